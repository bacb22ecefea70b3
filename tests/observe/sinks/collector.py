# SPDX-License-Identifier: Apache-2.0
"""A collector of OpenTelemetry in the test: it receives OTLP over HTTP and decodes it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Received(NamedTuple):
    """A log record or a span, with the attributes of its resource."""

    resource: Mapping[str, Any]
    attributes: Mapping[str, Any]
    #: the message of the protocol
    data: Any


class Collector:
    """Keeps what it receives."""

    def __init__(self) -> None:
        self.records: list[Received] = []
        self.spans: list[Received] = []
        #: the status of its answers; others than 200 take nothing
        self.status = 200
        #: a collector without this path returns 404 for it
        self.lacks_path = ""
        self.requests = 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    @property
    def url(self) -> str:
        """Its address, as OTEL_EXPORTER_OTLP_ENDPOINT has it."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def by_name(self) -> dict[str, Received]:
        """The spans."""
        return {one.data.name: one for one in self.spans}

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _take(self, path: str, body: bytes) -> None:
        if path == "/v1/logs":
            logs = ExportLogsServiceRequest.FromString(body)
            for of_resource in logs.resource_logs:
                for of_scope in of_resource.scope_logs:
                    self.records += _received(of_resource.resource, of_scope.log_records)
        elif path == "/v1/traces":
            traces = ExportTraceServiceRequest.FromString(body)
            for spans_of_resource in traces.resource_spans:
                for spans_of_scope in spans_of_resource.scope_spans:
                    self.spans += _received(spans_of_resource.resource, spans_of_scope.spans)

    def _handler(collector) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.requests += 1
                status = 404 if self.path == collector.lacks_path else collector.status
                if status == 200:
                    collector._take(self.path, body)
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                pass

        return Handler


def _received(resource: Any, found: Sequence[Any]) -> list[Received]:
    return [Received(_values(resource.attributes), _values(one.attributes), one) for one in found]


def _values(attributes: Sequence[Any]) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
