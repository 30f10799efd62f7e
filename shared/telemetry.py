"""Traces (OpenTelemetry, OTLP) and metrics (Prometheus) of one service process.

Invariant: telemetry never changes what a service does: an exporter that fails only loses spans. Trace context travels
in the NATS header `traceparent`. Off, a span costs a call and a context manager, and nobody reads the metrics.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagators.textmap import default_getter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from shared.config import TelemetryConfig

log = logging.getLogger("gyre.telemetry")

_propagator = TraceContextTextMapPropagator()
PORTS_TRIED = 64
EXPORT_LIMIT_S = 2.0
Attribute = str | int | float | bool


class JsonFileExporter(SpanExporter):
    """Appends one OTLP/JSON ExportTraceServiceRequest a line (ids in hex, as OTLP/JSON wants)."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        from google.protobuf.json_format import MessageToDict

        request: dict[str, Any] = MessageToDict(encode_spans(spans), use_integers_for_enums=True)
        for span in _spans_of(request):
            for holder in (span, *span.get("links", ())):
                for key in ("traceId", "spanId", "parentSpanId"):
                    if holder.get(key):
                        holder[key] = base64.b64decode(holder[key]).hex()
        self._file.write(json.dumps(request, separators=(",", ":")) + "\n")
        self._file.flush()
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._file.close()


def _spans_of(request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for resource in request.get("resourceSpans", ()):
        for scope in resource.get("scopeSpans", ()):
            yield from scope.get("spans", ())


class Trail:
    """The headers of the last message about each of many things (`key`), the oldest forgotten."""

    def __init__(self, most: int = 4096) -> None:
        self._headers: dict[str, Mapping[str, str]] = {}
        self._most = most

    def note(self, key: str, headers: Mapping[str, str]) -> None:
        self._headers.pop(key, None)
        self._headers[key] = headers
        if len(self._headers) > self._most:
            del self._headers[next(iter(self._headers))]

    def get(self, key: str) -> Mapping[str, str] | None:
        return self._headers.get(key)


class Telemetry:
    """Made by `start` (or `off`). One registry and one tracer per process."""

    def __init__(self, actor: str, provider: TracerProvider | None, port: int = 0) -> None:
        self.actor, self.prometheus_port = actor, port
        self.registry = CollectorRegistry()
        self._provider = provider
        self._tracer = provider.get_tracer("gyre") if provider is not None else None
        self._metrics: dict[str, Counter | Gauge | Histogram] = {}

    @classmethod
    def off(cls, actor: str = "off") -> Telemetry:
        return cls(actor, None)

    @classmethod
    def start(cls, actor: str, run_dir: Path, config: TelemetryConfig) -> Telemetry:
        """Exporters as configured. The process serves /metrics on the first free port from prometheus_port on."""
        exporter: SpanExporter
        if config.otlp_endpoint:
            exporter = OTLPSpanExporter(
                endpoint=config.otlp_endpoint.rstrip("/") + "/v1/traces", timeout=EXPORT_LIMIT_S
            )
        else:
            run_dir.mkdir(parents=True, exist_ok=True)
            exporter = JsonFileExporter(run_dir / f"traces-{actor}.jsonl")
        resource = Resource.create({"service.name": actor, "service.namespace": "gyre", "gyre.run": run_dir.name})
        provider = TracerProvider(resource=resource)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        telemetry = cls(actor, provider)
        if config.prometheus_port:
            telemetry.prometheus_port = telemetry._serve_metrics(config.prometheus_port)
        return telemetry

    def _serve_metrics(self, first: int) -> int:
        for port in range(first, first + PORTS_TRIED):
            try:
                start_http_server(port, addr="127.0.0.1", registry=self.registry)
            except OSError:
                continue
            log.info("metrics at http://127.0.0.1:%d/metrics", port)
            return port
        log.warning("no free port in %d..%d: no metrics", first, first + PORTS_TRIED - 1)
        return 0

    # --------------------------------------------------------------------------------------------------- traces

    @contextlib.contextmanager
    def span(
        self, name: str, parent: Mapping[str, str] | None = None, attributes: Mapping[str, Attribute] | None = None
    ) -> Iterator[trace.Span]:
        """A span, current inside the block; `parent` are the headers of the message that it continues."""
        if self._tracer is None:
            yield trace.INVALID_SPAN
            return
        context = _propagator.extract(dict(parent), getter=default_getter) if parent else None
        with self._tracer.start_as_current_span(name, context=context, attributes=dict(attributes or {})) as span:
            yield span

    def past(
        self, name: str, started: float, parent: Mapping[str, str] | None, attributes: Mapping[str, Attribute]
    ) -> None:
        """A span from `started` (seconds since the epoch) until now; `parent` as in `span`."""
        if self._tracer is not None:
            context = _propagator.extract(dict(parent), getter=default_getter) if parent else None
            self._tracer.start_span(name, context, attributes=dict(attributes), start_time=int(started * 1e9)).end()

    def inject(self, headers: dict[str, str]) -> None:
        """Put the current span's context into message headers."""
        if self._tracer is not None and trace.get_current_span().get_span_context().is_valid:
            _propagator.inject(headers)

    # -------------------------------------------------------------------------------------------------- metrics

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        """The counter of that name; the first call makes it."""
        metric = self._metrics.get(name) or Counter(name, text, labels, registry=self.registry)
        self._metrics[name] = metric
        assert isinstance(metric, Counter)
        return metric

    def gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        metric = self._metrics.get(name) or Gauge(name, text, labels, registry=self.registry)
        self._metrics[name] = metric
        assert isinstance(metric, Gauge)
        return metric

    def histogram(self, name: str, text: str, labels: Sequence[str] = ()) -> Histogram:
        metric = self._metrics.get(name) or Histogram(name, text, labels, registry=self.registry)
        self._metrics[name] = metric
        assert isinstance(metric, Histogram)
        return metric

    def shutdown(self) -> None:
        """Export what is left; blocks for EXPORT_LIMIT_S or so if the receiver is away."""
        if self._provider is not None:
            self._provider.shutdown()
