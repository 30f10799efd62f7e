"""The frame of a service as a real process: waiting for its run, stopping in order, exit codes; telemetry."""

from __future__ import annotations

import asyncio
import http.server
import json
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

from shared.bus import Bus
from shared.config import TelemetryConfig
from shared.events import StopRequested
from shared.service import NotARun, actor_name
from shared.telemetry import Telemetry
from tests.shared.support import context, history, new_run

PROGRAM = """
import asyncio, sys
from shared.service import run_service

async def serve(ctx):
    if sys.argv[3] == "broken":
        raise RuntimeError("this service is broken")
    print(ctx.actor, ctx.config.name, ctx.args["cell"], flush=True)
    await ctx.stop.wait()
    print("in order", flush=True)

sys.exit(run_service("cell-agent", sys.argv[1], sys.argv[2], serve, {"cell": "1"}, with_parent=True))
"""


def start(url: str, run: str, kind: str = "good") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, url, run, kind], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


async def test_a_service_waits_for_its_run_and_stops_in_order(nats_url: str, fresh_run: str, tmp_path: Path) -> None:
    process = start(nats_url, fresh_run)  # before stream and run are there
    await asyncio.sleep(0.5)
    control = await new_run(nats_url, fresh_run, tmp_path)
    assert process.stdout is not None
    assert await asyncio.to_thread(process.stdout.readline) == "cell_agent-1 test 1\n"
    process.terminate()
    out, errors = await asyncio.to_thread(process.communicate, timeout=10)
    assert (process.returncode, out) == (0, "in order\n")
    assert "cell_agent-1 INFO gyre.service: stopping" in errors
    await control.close()


async def test_a_broken_service_says_why_and_exits_with_one(nats_url: str, fresh_run: str, tmp_path: Path) -> None:
    control = await new_run(nats_url, fresh_run, tmp_path)
    process = start(nats_url, fresh_run, "broken")
    _, errors = await asyncio.to_thread(process.communicate, timeout=60)
    assert process.returncode == 1
    assert "RuntimeError: this service is broken" in errors
    await control.close()


async def test_a_service_that_still_waits_for_a_server_stops_at_once(fresh_run: str) -> None:
    process = start("nats://127.0.0.1:1", fresh_run)
    assert process.stderr is not None
    assert "nats://127.0.0.1:1" in await asyncio.to_thread(process.stderr.readline)  # it says what it waits for
    process.terminate()
    assert await asyncio.to_thread(process.wait, 5) == 0


async def test_a_stream_that_does_not_start_with_a_run_is_no_run(nats_url: str, fresh_run: str) -> None:
    bus = await Bus.connect(nats_url, fresh_run, "control")
    await bus.create_stream()
    await bus.publish(StopRequested(reason="first"))
    with pytest.raises(NotARun, match="StopRequested"):
        await context(nats_url, fresh_run)
    await bus.close()


def test_actors_have_names_of_their_own() -> None:
    assert actor_name("scheduler", {}) == "scheduler"
    assert actor_name("cell_agent", {"cell": "2"}) == "cell_agent-2"


# --------------------------------------------------------------------------------------------------------- telemetry


async def test_a_trace_goes_on_through_the_bus_and_lands_in_the_file(
    nats_url: str, fresh_run: str, tmp_path: Path
) -> None:
    control = await new_run(nats_url, fresh_run, tmp_path)
    ctx = await context(nats_url, fresh_run)
    with ctx.telemetry.span("dispatch", attributes={"step": 3}):
        await ctx.bus.publish(StopRequested(reason="traced"))
    message = (await history(control))[-1]
    with ctx.telemetry.span("work", parent=message.headers):
        pass
    ctx.telemetry.shutdown()
    lines = (tmp_path / "traces-scheduler.jsonl").read_text().splitlines()
    spans = {
        span["name"]: span
        for line in lines
        for resource in json.loads(line)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    }
    assert spans["work"]["parentSpanId"] == spans["dispatch"]["spanId"]
    assert spans["work"]["traceId"] == spans["dispatch"]["traceId"] == message.headers["traceparent"].split("-")[1]
    assert spans["dispatch"]["attributes"] == [{"key": "step", "value": {"intValue": "3"}}]
    await ctx.bus.close()
    await control.close()


def test_spans_reach_an_otlp_receiver_over_http(tmp_path: Path) -> None:
    bodies: list[tuple[str, bytes]] = []

    class Receiver(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    server = http.server.HTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    telemetry = Telemetry.start("proxy", tmp_path, TelemetryConfig(otlp_endpoint=endpoint))
    with telemetry.span("call"):
        pass
    telemetry.shutdown()
    server.shutdown()
    assert bodies[0][0] == "/v1/traces"
    assert b"call" in bodies[0][1]


def test_metrics_are_served_on_the_first_free_port(tmp_path: Path) -> None:
    first = Telemetry.start("a", tmp_path, TelemetryConfig(prometheus_port=19464))
    second = Telemetry.start("b", tmp_path, TelemetryConfig(prometheus_port=19464))
    assert second.prometheus_port > first.prometheus_port >= 19464
    second.counter("gyre_calls", "Model calls.", ["cell"]).labels("1").inc(3)
    assert second.counter("gyre_calls", "Model calls.", ["cell"]) is second.counter("gyre_calls", "", ["cell"])
    text = urllib.request.urlopen(f"http://127.0.0.1:{second.prometheus_port}/metrics").read().decode()
    assert 'gyre_calls_total{cell="1"} 3.0' in text
    for telemetry in (first, second):
        telemetry.shutdown()


def test_telemetry_that_is_off_costs_nearly_nothing_and_injects_nothing() -> None:
    telemetry, headers = Telemetry.off(), dict[str, str]()
    with telemetry.span("x"):
        telemetry.inject(headers)
    telemetry.counter("n", "N.").inc()
    telemetry.shutdown()
    assert headers == {}
