# SPDX-License-Identifier: Apache-2.0
"""`LogFolderControl`: the jobs that launchers run themselves, known by their log folders."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fleetlight.errors import ConfigError
from fleetlight.launch.backends import MemberState
from fleetlight.launch.process_identity import Presence, presence, send
from fleetlight.launch.processes.logs import ENDPOINTS
from fleetlight.launch.processes.record import LauncherRecord, ProcessEntry, read_records
from fleetlight.launch.screen import Prefixed
from fleetlight.observe.telemetry.history import EventFiles
from fleetlight.observe.telemetry.process_events import ProcessEvents
from fleetlight.roles.address import is_loopback

_LOG = re.compile(r"(?P<kind>worker|server)log\.(?P<index>\d+)")
_ENDPOINT = re.compile(r"(?P<name>(server|worker) \d+) (?P<host>.+):\d+")
_CHUNK = 1 << 20


class LogFolderControl:
    """Reads the records of launchers, and asks a launcher on this machine to stop."""

    def status(self, job_id: str) -> Sequence[MemberState]:
        """The launchers and the processes, each once; those without a record are unknown."""
        folder = _folder(job_id)
        records = _records(folder)
        # a launcher that has replaced a lost one comes first
        records.sort(key=lambda found: _presence(found[0]) is Presence.ENDED)
        launchers = [_launcher(record, len(records) > 1) for record, _ in records]
        members: dict[str, MemberState] = {}
        for record, _ in records:
            for process in record.processes:
                members.setdefault(process.name, _member(record, process))
        running = {r.host: r for r, _ in records if _presence(r) is not Presence.ENDED}
        rest = {name: host for name, host in _endpoints(folder).items() if name not in members}
        here = {name: running[host] for name, host in rest.items() if host in running}
        members |= {name: MemberState(name, "starting", _where(one)) for name, one in here.items()}
        if len(here) < len(rest):
            otherwise = _state_elsewhere(records, is_over=not running)
            events = ProcessEvents(EventFiles(folder, "fleetrun").poll())
            for name in rest.keys() - here.keys():
                members[name] = _elsewhere(name, rest[name], events, otherwise)
        return [*launchers, *(members[name] for name in sorted(members, key=_order))]

    def logs(self, job_id: str, member: str | None, start: int = 0) -> Iterator[bytes]:
        """The logs of all processes, each line after a prefix, or that of one process."""
        folder = _folder(job_id)
        files = _log_files(folder)
        if member is not None:
            if member not in files:
                raise ConfigError(_without_log(folder, member, files))
            yield from _chunks(files[member], start)
            return
        for name, file in files.items():
            shown: list[bytes] = []
            lines = Prefixed(name, shown.append)
            for data in _chunks(file):
                lines(data)
                yield from shown
                shown.clear()
            lines.finish()
            yield from shown

    def stop(self, job_id: str) -> None:
        """Send SIGTERM to a launcher on this machine; it ends the job on all machines."""
        records = _records(_folder(job_id))
        for record, owner in records:
            is_here = _presence(record) is Presence.RUNNING
            if is_here and send(signal.SIGTERM, record.pid, record.start, owner):
                return
        raise ConfigError(_unstoppable(job_id, [record for record, _ in records]))

    def scale(self, job_id: str, counts: Mapping[str, int]) -> str:
        """Refuse, and say what to do."""
        raise ConfigError(
            f"fleetlight scale {job_id}: fleetrun itself runs this job, and does not change its "
            f"counts; add workers with fleetrun --join {job_id} if it has --worker_max, or end it "
            f"with fleetlight stop {job_id}, then start it with other counts and --resume"
        )


def _folder(job_id: str) -> Path:
    folder = Path(job_id)
    if not folder.is_dir():
        raise ConfigError(
            f"{job_id} is no folder; expected the log folder of a job (fleetrun --log_dir)"
        )
    return folder


def _records(folder: Path) -> list[tuple[LauncherRecord, int]]:
    try:
        records = read_records(folder)
    except OSError as error:
        raise ConfigError(
            f"{error.filename} cannot be read: {error.strerror}; ask as the user who started the "
            "job"
        ) from None
    if not records:
        raise ConfigError(
            f"{folder} has no record of a job; expected the folder that fleetrun printed at its "
            "start (logs of earlier runs are in its folder old)"
        )
    return records


def _presence(record: LauncherRecord) -> Presence:
    if record.ended:
        return Presence.ENDED
    return presence(record.pid, record.start, record.system)


def _launcher(record: LauncherRecord, is_one_of_several: bool) -> MemberState:
    found = _presence(record)
    if record.code is not None:
        state = _ended(record.code)
    elif found is Presence.ENDED:
        state = "ended" if record.ended else "lost"
    else:
        state = "running"
    name = f"launcher of {record.host}" if is_one_of_several else "launcher"
    is_over = found is Presence.ENDED
    return MemberState(name, state, _where(record), _detail(record.pid, found), is_over)


def _member(record: LauncherRecord, process: ProcessEntry) -> MemberState:
    found = _presence(record)
    if process.status is not None:
        state = _ended(process.status)
    elif found is Presence.ENDED:
        # the launcher was killed, or could not end the process
        left = presence(process.pid, process.start, record.system)
        state = "running" if left is Presence.RUNNING else "ended"
    else:
        state = "running"
    detail = _detail(process.pid, found)
    restarts = f", restarts: {process.restarts}" if process.restarts else ""
    # a running launcher may start the process again
    is_over = found is Presence.ENDED and state != "running"
    return MemberState(process.name, state, _where(record), detail + restarts, is_over)


def _state_elsewhere(records: Sequence[tuple[LauncherRecord, int]], *, is_over: bool) -> str:
    """The state of processes of other machines that were started, and whose end is not known."""
    if not is_over:
        return "running"
    return "ended" if any(record.ended for record, _ in records) else "unknown"


def _elsewhere(name: str, host: str, events: ProcessEvents, otherwise: str) -> MemberState:
    """A process of another machine, by the events that its launcher sent."""
    start, status = events.start(name, host), events.status(name, host)
    state = otherwise if status is None else _ended(status)
    if start is None or state == "unknown":
        return MemberState(name, "unknown", host, "run fleetlight ps there", is_over=True)
    restarts = f", restarts: {start.restart}" if start.restart else ""
    detail = f"pid {start.pid} (not checked){restarts}"
    # its launcher may start it again
    return MemberState(name, state, host, detail, is_over=otherwise != "running")


def _where(record: LauncherRecord) -> str:
    name = record.system.hostname
    return name if is_loopback(record.host) else f"{name} ({record.host})"


def _detail(pid: int, found: Presence) -> str:
    return f"pid {pid}" + (" (not checked)" if found is Presence.UNKNOWN else "")


def _ended(status: int) -> str:
    return f"ended with code {status}" if status >= 0 else f"killed by {_signal(-status)}"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _endpoints(folder: Path) -> dict[str, str]:
    """The machine of each process of the job, by the file of endpoints."""
    try:
        lines = (folder / ENDPOINTS).read_text(errors="replace").splitlines()
    except OSError:
        return {}
    found = (_ENDPOINT.fullmatch(line) for line in lines)
    return {one["name"]: one["host"] for one in found if one is not None}


def _log_files(folder: Path) -> dict[str, Path]:
    found = ((_LOG.fullmatch(path.name), path) for path in folder.iterdir())
    files = {f"{one['kind']} {one['index']}": path for one, path in found if one is not None}
    return {name: files[name] for name in sorted(files, key=_order)}


def _order(name: str) -> tuple[str, int]:
    kind, _, index = name.partition(" ")
    return kind, int(index)


def _without_log(folder: Path, member: str, files: Mapping[str, Path]) -> str:
    if (host := _endpoints(folder).get(member)) is not None:
        return f"{folder} has no log of {member}, which runs on {host}; ask there"
    return f"{folder} has no log of {member!r}; expected one of {', '.join(files) or 'none so far'}"


def _chunks(file: Path, start: int = 0) -> Iterator[bytes]:
    with file.open("rb") as log:
        log.seek(start)
        while data := log.read(_CHUNK):
            yield data


def _unstoppable(job_id: str, records: Sequence[LauncherRecord]) -> str:
    """Why no launcher could be asked to stop."""
    for record in records:
        launcher = f"its launcher is process {record.pid} on {_where(record)}"
        if _presence(record) is Presence.RUNNING:
            return f"cannot stop the job in {job_id}: {launcher}, which belongs to another user"
        if _presence(record) is Presence.UNKNOWN:
            return (
                f"cannot stop the job in {job_id} from here: {launcher}; run fleetlight stop there"
            )
    code = next((record.code for record in records if record.code is not None), None)
    how = "" if code is None else f" with code {code}"
    return f"the job in {job_id} has ended{how}; nothing to stop"
