"""Packages that can be called: pdtx.plan and pdtx.layout are packages, and public functions of the same names."""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class CallablePackage(ModuleType):
    """A package that stands for a function as well. public_function: "module:name", imported when it is called."""

    public_function: str

    def __call__(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - the function's own
        """Call the function."""
        module, _, name = self.public_function.partition(":")
        return getattr(import_module(module), name)(*arguments, **options)


def make_callable(package: str, public_function: str) -> None:
    """Let a package that is being imported be called."""
    module = sys.modules[package]
    module.__class__ = CallablePackage
    vars(module)["public_function"] = public_function
