# SPDX-License-Identifier: Apache-2.0
"""Processes train without torch's compiler, and load it completely on demand."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from tests.launch.workplace import free_ports
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fleetlight.errors import TorchVersionError
from fleetlight.torch_compat.compiler.lazy_dynamo import late_step, postpone_compiler
from fleetlight.torch_compat.version import NEWEST, OLDEST, check_torch, untested_torch

pytestmark = [pytest.mark.contract, pytest.mark.slow]

START = """
import importlib.util
import sys
import warnings
import torch
import fleetlight as fleet

# such as torch's about a scheduler that comes first
warnings.simplefilter("error", UserWarning)
KINDS = (torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop)

def is_loaded():
    return "torch._dynamo" in sys.modules

"""
SERVER = """
from tests.ps.servers import DenseServers

fleet.init()
assert fleet.is_server()
for kind in KINDS:
    model = torch.nn.Linear(2, 1)
    first = [model.weight]
    if kind is torch.optim.Adagrad:
        # until torch 2.11 its own add_param_group leaves parameters without state
        first = [model.weight, model.bias]
    optimizer = kind(first, lr=0.5)
    if len(first) == 1:
        optimizer.add_param_group({"params": [model.bias]})
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    dense = DenseServers(list(model.parameters()), [optimizer], 1)
    before = model.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    dense.step()
    dense.take()
    assert not torch.equal(model.weight, before), kind
fleet.distributed_model(model)
fleet.distributed_optimizer(optimizer)
fleet.init_server()
"""
WORKER = """
fleet.init(is_collective=True)
for kind in KINDS:
    model = torch.nn.Linear(2, 1)
    optimizer = kind(model.parameters(), lr=0.5)
    fleet.distributed_model(model)
    # the scheduler comes before or after
    if kind is torch.optim.SGD:
        fleet.distributed_optimizer(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    if kind is not torch.optim.SGD:
        fleet.distributed_optimizer(optimizer)
    before = model.weight.detach().clone()
    for closure in (None, lambda: model(torch.ones(1, 2)).sum()):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step(closure)
        scheduler.step()
    assert not torch.equal(model.weight, before), kind
    optimizer.load_state_dict(optimizer.state_dict())
"""
NOT_LOADED = """
assert not is_loaded()
assert importlib.util.find_spec("torch._dynamo").origin.endswith("__init__.py")
"""
COMPILES = """
double = torch.compile(lambda x: 2 * x, backend="eager")
assert double(torch.ones(1)).item() == 2
assert torch._dynamo.backends.registry
"""
SETS_AN_OPTION = """
import torch._dynamo.config as config
from torch._dynamo.utils import counters
config.recompile_limit = 3
from torch._dynamo import convert_frame, symbolic_convert
assert convert_frame.config.recompile_limit == 3
assert symbolic_convert.counters is counters
"""
#: torch hides the method from its compiler as soon as the compiler is loaded
HIDES_METHODS = """
import torch._dynamo
optimizer.zero_grad()
hidden = torch.optim.Optimizer.zero_grad.__wrapped__.__dict__["__dynamo_disable"]
assert hidden._torchdynamo_disable
"""


def run_script(script: str, variables: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", START + script],
        env={**os.environ, **variables, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


THENS = {"runs": COMPILES, "set": SETS_AN_OPTION, "told": HIDES_METHODS}


@pytest.mark.parametrize(
    ("role", "then"),
    [*(("server", then) for then in THENS), ("worker", "told"), ("worker", "runs")],
)
def test_a_process_loads_the_compiler_only_on_demand(role: str, then: str) -> None:
    script = {"server": SERVER, "worker": WORKER}[role] + NOT_LOADED + THENS[then]
    variables = {
        "FLEET_ROLE": "server",
        "FLEET_INDEX": "0",
        "FLEET_SERVER_NUM": "1",
        "FLEET_WORKER_NUM": "1",
        "FLEET_SERVER_ENDPOINTS": f"127.0.0.1:{free_ports(['127.0.0.1'], 1)}",
    }
    run_script(script, variables if role == "server" else {})


WITH_A_TABLE = """
fleet.init()
model = fleet.distributed_model(torch.nn.Sequential(fleet.nn.SparseEmbedding(2)))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
fleet.init_worker()
ids = torch.tensor([3, 4])
before = model(ids).detach()
for _ in range(2):
    optimizer.zero_grad()
    model(ids).sum().backward()
    optimizer.step()
assert torch.equal(model(ids), before - 2)
fleet.stop_worker()
loaded = {"torch._dynamo", "torch.distributed.tensor", "sympy"} & set(sys.modules)
assert not loaded, loaded
"""


@pytest.mark.long
def test_a_worker_with_tables_loads_no_slow_modules() -> None:
    run_script(WITH_A_TABLE, {})


def test_optimizer_methods_need_no_compiler() -> None:
    """The methods that torch hides from its compiler have their plain form ready."""
    postpone_compiler()
    hidden = [getattr(torch.optim.Optimizer, name) for name in ("zero_grad", "add_param_group")]
    for method in hidden:
        assert method.__wrapped__.__dict__["__dynamo_disable"] is not None


def weight() -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return parameter


def test_a_late_step_calls_hooks_and_disables_gradients() -> None:
    parameter, seen = weight(), []
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    hook = register_optimizer_step_post_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))  # type: ignore[arg-type]
    try:
        late_step(optimizer)()
    finally:
        hook.remove()
    assert seen == ["before", True]
    assert parameter.tolist() == [0.5, 0.5]


class CustomOptimizer(torch.optim.Optimizer):
    """Steps in its own way."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.fill_(7)


def test_a_custom_step_is_called_unchanged() -> None:
    parameter = weight()
    late_step(CustomOptimizer([parameter]))()
    assert parameter.tolist() == [7, 7]


# -- an old torch is refused at import; one newer than those tested is warned about once ----------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("version", ["2.8.0", "2.8.0+cu128", "1.13.1"])
def test_an_old_torch_is_refused_with_advice(version: str) -> None:
    with pytest.raises(TorchVersionError) as raised:
        check_torch(version)
    expected = f"got torch {version}, expected 2.9 or newer; pip install 'torch>=2.9'"
    assert str(raised.value) == expected


@pytest.mark.sampled(4)
@pytest.mark.parametrize("version", ["2.9.0", "2.13.0+cpu", "2.16.0a0+git1234", "3.0.1"])
def test_supported_versions_are_accepted(version: str) -> None:
    check_torch(version)


def test_only_a_torch_newer_than_tested_is_reported() -> None:
    newest = ".".join(map(str, NEWEST))
    assert untested_torch(f"{newest}.1+cpu") is None
    assert untested_torch(".".join(map(str, OLDEST))) is None
    assert f"torch 99.1.0 is newer than {newest}" in (untested_torch("99.1.0") or "")


WITH_VERSION = """
import torch
torch.__version__ = {version!r}
import fleetlight as fleet
"""


def run(
    version: str, script: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    source = WITH_VERSION.format(version=version) + script
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, env=env)


def test_the_first_use_of_the_api_raises_the_error() -> None:
    done = run("2.8.0", "fleet.init")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("fleetlight.errors.TorchVersionError: got torch 2.8.0, expected 2.9")


def test_several_inits_warn_once() -> None:
    done = run("99.0.0", "fleet.init(is_collective=True)\nfrom fleetlight.fleet import lifecycle\n"
               "lifecycle._warn_of_untested_torch()")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("torch 99.0.0 is newer than") == 1


@pytest.mark.long
def test_only_the_first_worker_warns() -> None:
    variables = {
        "FLEET_ROLE": "worker",
        "FLEET_WORKER_NUM": "2",
        "FLEET_MASTER": "127.0.0.1:1",
        "FLEET_DEADLINE_S": "1",
    }
    for index in range(2):
        # no other worker arrives
        env = {**os.environ, **variables, "FLEET_INDEX": str(index)}
        done = run("99.0.0", "fleet.init(is_collective=True)", env)
        assert done.returncode == 69
        assert ("torch 99.0.0 is newer than" in done.stderr) == (index == 0), done.stderr


def test_this_torch_is_supported() -> None:
    check_torch(torch.__version__)
