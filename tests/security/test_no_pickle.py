# SPDX-License-Identifier: Apache-2.0
"""The package unpickles and evaluates nothing that comes from a wire or a file."""

import ast
from collections.abc import Iterator

import pytest
from tests.tidy.sources import PACKAGE, SOURCES, parsed

MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
#: calls that create objects or code from bytes, by their full names
CALLS = {
    *("eval", "exec", "__import__"),
    *("torch.load", "torch.save", "torch.jit.load", "torch.hub.load", "torch.export.load"),
    *("np.load", "numpy.load", "yaml.load"),
}
#: collectives of torch that pickle, on any object
COLLECTIVES = {
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}
#: exceptions: the file, the call, and why the data is trusted
ALLOWED = {
    (
        "launch/machines/rendezvous_state.py",
        "pickle",
    ): "torch's own state, pickled by this very process",
    ("static/coding/python.py", "exec"): "code written here, of operations from a list",
    ("static/coding/inductor.py", "exec"): "the same",
    (
        "checkpoint/inference/archive.py",
        "torch.export.load",
    ): "after refuse_pickle, for trusted files",
}


def used(tree: ast.AST) -> Iterator[str]:
    """The listed modules that are imported and the listed functions that are called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            yield node.module or ""
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in CALLS or called.rpartition(".")[2] in COLLECTIVES:
                yield called


@pytest.mark.style
@pytest.mark.slow
def test_only_listed_files_unpickle_or_evaluate() -> None:
    found = {
        (str(path.relative_to(PACKAGE)), name) for path in SOURCES for name in used(parsed(path))
    }
    assert found == set(ALLOWED)


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from marshal import loads",
        "torch.load(path)",
        "eval(text)",
        "dist.all_gather_object(a, b)",
        "numpy.load(file, allow_pickle=True)",
    ],
)
def test_each_kind_of_call_is_found(text: str) -> None:
    assert list(used(ast.parse(text)))
