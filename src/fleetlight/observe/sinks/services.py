# SPDX-License-Identifier: Apache-2.0
"""`MetricSink`: receives the metrics of a job; one class for each service."""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from fleetlight.errors import ConfigError, did_you_mean

#: how long a service may take to begin a run
_OPEN_S = 10.0


class MetricSink(Protocol):
    """Receives the metrics of a job."""

    def write(self, step: int, values: Mapping[str, float], at: float) -> None:
        """Record the values of a step, at a time in seconds since 1970."""

    def close(self) -> None:
        """Deliver what was written, and end."""


class TensorBoardSink:
    """Event files in a folder, as `tensorboard --logdir` reads them."""

    def __init__(self, folder: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(folder or "runs")

    def write(self, step: int, values: Mapping[str, float], at: float) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=at)
        self._writer.flush()

    def close(self) -> None:
        """Write the rest."""
        self._writer.close()


class MLflowSink:
    """A run of MLflow: the one that the script has started, or a new one."""

    def __init__(self, active: Any) -> None:
        """`active`: the run of the script, if any."""
        import mlflow

        self._client: Any = mlflow.MlflowClient()
        self._is_own = active is None
        with _few_attempts():
            self._run = (active or mlflow.start_run()).info.run_id

    def write(self, step: int, values: Mapping[str, float], at: float) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(n, v, round(1000 * at), step) for n, v in values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        """End the run, unless the script has started it."""
        import mlflow

        if self._is_own:
            with _few_attempts():
                mlflow.end_run()


@contextlib.contextmanager
def _few_attempts() -> Iterator[None]:
    """Without a server MLflow would try for minutes; what the user has set remains."""
    from mlflow import environment_variables

    of: Any = environment_variables
    wanted = {
        of.MLFLOW_HTTP_REQUEST_TIMEOUT: round(_OPEN_S),
        of.MLFLOW_HTTP_REQUEST_MAX_RETRIES: 1,
    }
    own = {variable: value for variable, value in wanted.items() if not variable.is_set()}
    for variable, value in own.items():
        variable.set(value)
    try:
        yield
    finally:
        for variable in own:
            variable.unset()


class WandbSink:
    """A run of Weights & Biases; without a login it stays on this machine."""

    def __init__(self, project: str) -> None:
        import wandb

        self._is_own = wandb.run is None
        self._run: Any = wandb.run
        if self._is_own:
            has_login = bool(wandb.api.api_key)
            self._run = wandb.init(
                project=project or "fleetlight",
                mode=None if has_login else "offline",
                settings=wandb.Settings(init_timeout=_OPEN_S),
            )

    def write(self, step: int, values: Mapping[str, float], at: float) -> None:
        # the service counts its own steps, which must grow
        self._run.log({**values, "step": step, "time": at})

    def close(self) -> None:
        """End the run, unless the script has started it."""
        if self._is_own:
            self._run.finish()


def _tensorboard(folder: str) -> Callable[[], MetricSink]:
    _imported("tensorboard", "torch.utils.tensorboard")
    return functools.partial(TensorBoardSink, folder)


def _mlflow(uri: str) -> Callable[[], MetricSink]:
    mlflow = _imported("mlflow", "mlflow")
    if uri:
        mlflow.set_tracking_uri(uri)
    # only the thread of the script knows its run
    return functools.partial(MLflowSink, mlflow.active_run())


def _wandb(project: str) -> Callable[[], MetricSink]:
    _imported("wandb", "wandb")
    return functools.partial(WandbSink, project)


def _python(name: str) -> Callable[[], MetricSink]:
    """A sink of the user: what a class or a function makes, by its name with its module."""
    module, _, made = name.rpartition(".")
    try:
        make: Callable[[], MetricSink] = getattr(importlib.import_module(module), made)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"sinks: python:{name} cannot be imported ({error}); expected a class in a module "
            "that the script can import, such as python:my_sinks.MySink"
        ) from None
    return make


#: by kind: imports what its sinks need, and returns what opens one, which may take long or fail
_KINDS: Mapping[str, Callable[[str], Callable[[], MetricSink]]] = {
    "tensorboard": _tensorboard,
    "mlflow": _mlflow,
    "wandb": _wandb,
    "python": _python,
}


def openers(text: str) -> dict[str, Callable[[], MetricSink]]:
    """What opens each sink of a setting, such as `tensorboard:runs,wandb:clicks`."""
    return {one: _opener(one) for one in map(str.strip, text.split(",")) if one}


def _opener(one: str) -> Callable[[], MetricSink]:
    kind, _, where = one.partition(":")
    if kind not in _KINDS:
        raise ConfigError(f"sinks: got {one!r}; {did_you_mean(kind, _KINDS)}")
    return _KINDS[kind](where)


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """Without NaN and infinities, which some services refuse."""
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _imported(kind: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"sinks: {kind} needs a package that cannot be imported ({error}); install it with: "
            f'pip install "fleetlight[{kind}]"'
        ) from None
