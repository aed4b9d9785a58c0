"""Plan a transfer and carry it out between two processes, over TCP; the receiver compares every element."""

import multiprocessing
from multiprocessing.connection import Connection

import torch

import pdtx

NHD = pdtx.layout("flash_attn_nhd", pdtx.spec_of("llama-3-8b", num_layers=2, block_size=16), num_blocks=8)
HND = pdtx.layout("flashinfer_hnd", pdtx.spec_of("llama-3-8b", num_layers=2, block_size=32), num_blocks=4)
PLAN = pdtx.plan(NHD, [3, 7, 5], HND, [2, 1], tokens=40)  # the same in both processes


def contents() -> torch.Tensor:
    return torch.arange(NHD.size_bytes // 2).to(torch.int16)  # 2-byte elements with numbers of their own


def sender(pipe: Connection) -> None:
    sent = pdtx.send(pdtx.transport("tcp"), pipe.recv(), PLAN, contents())
    print(f"sent {sent.nbytes:,} bytes in {PLAN.num_runs:,} runs over {sent.path}")


if __name__ == "__main__":
    memory, spawn = torch.zeros(HND.size_bytes // 2, dtype=torch.int16), multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=sender, args=(theirs,))
    process.start()
    with pdtx.receive(pdtx.transport("tcp"), PLAN, memory) as receiving:
        ours.send(receiving.ticket)
        receiving.wait()
    process.join()
    expected, given = torch.zeros_like(memory), contents()
    for source, destination, count in (PLAN.descriptors // 2).tolist():
        expected[destination : destination + count] = given[source : source + count]
    wrong = int((memory != expected).sum())
    print(f"received {PLAN.nbytes:,} bytes; {wrong} of {len(memory):,} elements wrong")
    raise SystemExit(1 if wrong or process.exitcode else 0)
