"""What deploy/ has for schedulers and containers: as far as it can be checked without them."""

import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy_scene import DEPLOY, ROOT, processes_of, run

_SLURM = all(
    shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin") for tool in ("munged", "slurmctld", "slurmd", "srun")
)
needs_schemas = pytest.mark.skipif(find_spec("kubernetes_validate") is None, reason="needs kubernetes-validate")


def scripts() -> Iterator[Path]:
    for path in sorted(DEPLOY.rglob("*")):
        if path.is_file() and path.read_bytes().startswith(b"#!/usr/bin/env bash"):
            yield path


class TestScripts:
    @pytest.mark.parametrize("path", list(scripts()), ids=lambda path: str(path.relative_to(DEPLOY)))
    def test_can_be_run_and_parsed(self, path: Path) -> None:
        assert path.suffix == ".sbatch" or os.access(path, os.X_OK)
        assert subprocess.run(["bash", "-n", path], capture_output=True, check=False).stderr == b""

    @pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
    def test_shellcheck(self) -> None:
        done = subprocess.run(["shellcheck", "-S", "warning", *scripts()], capture_output=True, text=True, check=False)
        assert done.stdout == ""

    def test_every_folder_tells_what_was_run(self) -> None:
        for folder in ("local", "ssh", "slurm", "kubernetes", "compose", "container"):
            text = (DEPLOY / folder / "README.md").read_text()
            assert "Not run" in text, folder


class TestKubernetes:
    @staticmethod
    def lint(*files: Path) -> subprocess.CompletedProcess[str]:
        return run([DEPLOY / "kubernetes" / "lint", *files], PDTX_LINT_PYTHON=sys.executable)

    @needs_schemas
    def test_manifests_are_valid(self) -> None:
        done = self.lint()
        assert done.returncode == 0, done.stdout
        assert done.stdout.count(": valid") == 3

    @needs_schemas
    @pytest.mark.parametrize(
        ("name", "old", "new", "fault"),
        [
            ("job", "completions: 2", "completion: 2", "completion"),
            ("job", "add: [IPC_LOCK]", "add: []", "no capability IPC_LOCK"),
            ("job", "medium: Memory", 'medium: ""', "no /dev/shm of medium Memory"),
            ("leaderworkerset", "size: 4", "size: four", "needs size"),
            ("leaderworkerset", "image: pdtx:latest", "images: pdtx:latest", "images"),
            ("leaderworkerset", "rdma/hca_shared_devices_a", "example.com/x", "no rdma resource"),
        ],
    )
    def test_faults_are_found(self, tmp_path: Path, name: str, old: str, new: str, fault: str) -> None:
        text = (DEPLOY / "kubernetes" / f"{name}.yaml").read_text()
        assert old in text
        (tmp_path / "changed.yaml").write_text(text.replace(old, new))
        done = self.lint(tmp_path / "changed.yaml")
        assert done.returncode == 1
        assert fault in done.stdout

    @pytest.mark.parametrize("name", ["job", "leaderworkerset"])
    def test_flags_are_those_of_pdtx_bench(self, name: str) -> None:
        """Every argument is one that the command knows, and its values can be read."""
        documents: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "kubernetes" / f"{name}.yaml").read_text()))
        spec = documents[-1]["spec"]
        template = spec["template"] if name == "job" else spec["leaderWorkerTemplate"]["workerTemplate"]
        arguments = template["spec"]["containers"][0]["args"]
        done = run([sys.executable, "-m", "pdtx", *arguments, "--print-config"])
        assert done.returncode == 0, done.stderr


class TestContainers:
    @pytest.mark.skipif(shutil.which("docker-compose") is None, reason="needs docker-compose")
    def test_compose(self, tmp_path: Path) -> None:
        """Version 1 of it knows all but the name at the head."""
        text = (DEPLOY / "compose" / "compose.yaml").read_text().replace("\nname: pdtx\n", "\n")
        (tmp_path / "compose.yaml").write_text(text)
        done = run(["docker-compose", "-f", tmp_path / "compose.yaml", "--profile", "run", "config"])
        assert done.returncode == 0, done.stderr

    def test_what_the_image_copies_is_there_and_let_in(self) -> None:
        lines = (DEPLOY / "container" / "Dockerfile").read_text().splitlines()
        copied = [
            word for line in lines if line.startswith("COPY ") and "--from" not in line for word in line.split()[1:-1]
        ]
        let_in = (DEPLOY / "container" / "Dockerfile.dockerignore").read_text().split()
        assert copied
        for name in copied:
            assert (ROOT / name).exists()
            assert f"!{name}" in let_in


def test_a_job_of_too_few_tasks_says_how_many_it_needs() -> None:
    done = run([DEPLOY / "slurm" / "measure", "2", "4"], SLURM_JOB_ID="1", SLURM_NTASKS="2")
    assert done.returncode == 2
    assert "sbatch --ntasks=6" in done.stderr


@pytest.mark.skipif(not _SLURM or os.geteuid() != 0, reason="needs root, munge, slurmctld, slurmd and srun")
class TestSlurm:
    def test_two_tasks_meet_on_two_made_up_nodes(self, tmp_path: Path) -> None:
        """What `measure` gives each task: its rank, the first node's address, one port for the job."""
        program = tmp_path / "pdtx"
        program.write_text('#!/bin/sh\necho "$SLURM_PROCID/$SLURM_NTASKS $MASTER_ADDR $MASTER_PORT $*"\n')
        program.chmod(0o755)
        log = tmp_path / "job.log"
        job: list[str | Path] = [DEPLOY / "slurm" / "two-nodes.sbatch", "--tokens", "512"]
        done = run(
            [DEPLOY / "slurm" / "lab", "sbatch", "--wait", f"--output={log}", *job],
            PDTX_BIN=str(tmp_path),
            PDTX_DEPLOY=str(DEPLOY),
        )
        assert done.returncode == 0, done.stderr
        lines = sorted(log.read_text().splitlines())
        assert [line.split(" ")[1] for line in lines] == ["0/2", "1/2"]
        assert {line.split(" ")[2] for line in lines} == {"127.0.0.1"}
        assert len({line.split(" ")[3] for line in lines}) == 1
        assert all(line.endswith("--tokens 512") and "--rendezvous --prefill-agents 1" in line for line in lines)

    @pytest.mark.parametrize(
        "command",
        [
            'exec srun --ntasks=1 bash -c "$0"',
            "sbatch --output=/dev/null --wrap \"bash -c '$0'\"; sleep 60; :",
        ],
        ids=["srun", "sbatch"],
    )
    def test_a_signal_leaves_neither_the_command_nor_a_task(self, tmp_path: Path, command: str) -> None:
        started = tmp_path / f"deploy-{uuid.uuid4().hex}"  # a mark, too: every process has it in its command line
        task = f"touch {started}; sleep 60; :"
        with subprocess.Popen([DEPLOY / "slurm" / "lab", "bash", "-c", command, task]) as lab:
            limit = time.monotonic() + 60
            while not started.exists():
                assert time.monotonic() < limit
                time.sleep(0.05)
            lab.terminate()
            assert lab.wait(60) == 128 + signal.SIGTERM
        assert processes_of(started.name) == []
