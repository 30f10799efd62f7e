"""The real scout program against a small local model server that each test scripts."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

SCOUT = Path(__file__).parents[2] / "examples/harness/scout/scout.py"


def say(text, tokens=10):
    """A reply without tool calls."""
    return {"content": text, "tokens": tokens}


def use(*calls, tokens=10):
    """A reply with tool calls, each (name, arguments); arguments that are text go out as they are."""
    return {
        "content": None,
        "tokens": tokens,
        "tool_calls": [
            {
                "id": f"call_{i}",
                "type": "function",
                "function": {"name": name, "arguments": a if isinstance(a, str) else json.dumps(a)},
            }
            for i, (name, a) in enumerate(calls)
        ],
    }


def fail(status, body="{}", headers=None):
    """An HTTP error."""
    return {"status": status, "body": body, "headers": headers or {}}


class ScriptedModelServer:
    """Answers each chat completion with the next scripted reply and keeps the requests. Not a model: a script.

    A reply is a dict from `say`, `use` or `fail`, the text "drop" (the connection is closed without an answer), or a
    function of the request that returns such a reply, which serves when calls come in no fixed order.
    """

    def __init__(self, replies):
        self.replies, self.requests, self.keys, self.lock = list(replies), [], [], threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with owner.lock:
                    owner.requests.append(request)
                    owner.keys.append(self.headers["authorization"])
                    reply = owner.replies.pop(0) if len(owner.replies) > 1 else owner.replies[0]
                owner.answer(self, request, reply(request) if callable(reply) else reply)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def answer(self, handler, request, reply):
        if reply == "drop":
            handler.close_connection = True
            handler.connection.shutdown(2)
            return
        if "status" in reply:
            self.send(handler, reply["status"], reply["body"].encode(), reply["headers"])
        elif request.get("stream"):
            self.send(handler, 200, stream_of(reply).encode(), {"content-type": "text/event-stream"})
        else:
            message = {"role": "assistant", "content": reply["content"]}
            if "tool_calls" in reply:
                message["tool_calls"] = reply["tool_calls"]
            body = {"choices": [{"index": 0, "message": message}], "usage": {"total_tokens": reply["tokens"]}}
            self.send(handler, 200, json.dumps(body).encode(), {"content-type": "application/json"})

    def send(self, handler, status, body, headers):
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("content-length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.http.server_port}/v1"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()


def stream_of(reply):
    """A reply as server-sent chunks, text and arguments in pieces of three characters."""
    chunks = []
    for i in range(0, len(reply["content"] or ""), 3):
        chunks.append({"choices": [{"delta": {"content": reply["content"][i : i + 3]}}]})
    for i, call in enumerate(reply.get("tool_calls", [])):
        head = {"index": i, "id": call["id"], "function": {"name": call["function"]["name"], "arguments": ""}}
        chunks.append({"choices": [{"delta": {"tool_calls": [head]}}]})
        text = call["function"]["arguments"]
        for j in range(0, len(text), 3):
            part = {"index": i, "function": {"arguments": text[j : j + 3]}}
            chunks.append({"choices": [{"delta": {"tool_calls": [part]}}]})
    chunks.append({"choices": [], "usage": {"total_tokens": reply["tokens"]}})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def run_scout(server, folder, *arguments, instruction="do it"):
    """Runs the program as a harness would: bare interpreter, clean environment, its folder as the current one."""
    return subprocess.run(
        [sys.executable, "-I", "-S", str(SCOUT), "--model", "m", *arguments, instruction],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "k1"},
        capture_output=True,
        text=True,
        timeout=60,
    )


def tool_results(request):
    return [m["content"] for m in request["messages"] if m["role"] == "tool"]


@pytest.mark.parametrize("stream", [(), ("--stream",)], ids=["whole", "streamed"])
def test_works_with_both_tools_and_stops_when_no_tool_is_called(tmp_path, stream):
    script = [
        use(("write_file", {"path": "a/b.txt", "content": "héllo\n"}), ("bash", {"command": "cat a/b.txt; exit 3"})),
        say("All done."),
    ]
    with ScriptedModelServer(script) as server:
        run = run_scout(server, tmp_path, *stream)
    assert (run.returncode, run.stdout) == (0, "All done.\n")
    assert (tmp_path / "a/b.txt").read_text() == "héllo\n"
    assert server.keys == ["Bearer k1", "Bearer k1"]
    assert tool_results(server.requests[1]) == ["wrote a/b.txt", "héllo\n[exit 3]"]
    assert [t["function"]["name"] for t in server.requests[0]["tools"]] == ["bash", "write_file", "delegate"]


def test_sends_back_what_the_model_said_byte_for_byte(tmp_path):
    odd = '{ "command":"true" ,"extra": 60000.0, "x": "\\u00e9" }'
    with ScriptedModelServer([use(("bash", odd)), say("ok")]) as server:
        run_scout(server, tmp_path)
    reply = server.requests[1]["messages"][2]
    assert reply["tool_calls"][0]["function"]["arguments"] == odd
    assert server.requests[1]["messages"][:2] == server.requests[0]["messages"]
    assert tool_results(server.requests[1]) == ["(no output)"]


@pytest.mark.parametrize(
    "call",
    [
        ("bash", '{"command": "true"'),
        ("bash", "[1]"),
        ("bash", '{"command": 7}'),
        ("bash", {"cmd": "true"}),
        ("shell", {"command": "true"}),
        ("", "not json"),
    ],
)
def test_a_malformed_call_gets_an_error_result(tmp_path, call):
    with ScriptedModelServer([use(call), say("ok")]) as server:
        assert run_scout(server, tmp_path).returncode == 0
    assert tool_results(server.requests[1]) == ["error: invalid tool call. Use one of bash, write_file, delegate."]


def test_a_tool_that_fails_tells_the_model(tmp_path):
    calls = use(("write_file", {"path": "/proc/nope/x", "content": ""}), ("bash", {"command": "sleep 9"}))
    with ScriptedModelServer([calls, say("ok")]) as server:
        assert run_scout(server, tmp_path, "--command-timeout", "0.3").returncode == 0
    first, second = tool_results(server.requests[1])
    assert first.startswith("error: ")
    assert second == "[stopped after 0.3 s]"


def test_commands_do_not_see_the_key(tmp_path):
    with ScriptedModelServer([use(("bash", {"command": "echo key=$OPENAI_API_KEY"})), say("ok")]) as server:
        run_scout(server, tmp_path)
    assert tool_results(server.requests[1]) == ["key=\n"]


@pytest.mark.parametrize("parallel", [(), ("--parallel",)], ids=["in order", "parallel"])
def test_a_sub_agent_has_its_own_context_and_no_delegate_tool(tmp_path, parallel):
    def script(request):
        task = request["messages"][1]["content"]
        if len(request["messages"]) > 2:
            return say(f"done: {task}")
        if task == "do it":
            return use(("delegate", {"task": "part one"}), ("delegate", {"task": "part two"}))
        return use(("write_file", {"path": task, "content": task}))

    with ScriptedModelServer([script]) as server:
        run = run_scout(server, tmp_path, *parallel)
    assert run.stdout == "done: do it\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["part one", "part two"]
    sub = [r for r in server.requests if r["messages"][1]["content"] != "do it"]
    assert len(sub) == 4
    assert all([t["function"]["name"] for t in r["tools"]] == ["bash", "write_file"] for r in sub)
    assert tool_results(server.requests[-1]) == ["done: part one", "done: part two"]


def test_no_subagents_leaves_the_tool_out(tmp_path):
    with ScriptedModelServer([use(("delegate", {"task": "x"})), say("ok")]) as server:
        run_scout(server, tmp_path, "--no-subagents")
    assert [t["function"]["name"] for t in server.requests[0]["tools"]] == ["bash", "write_file"]
    assert tool_results(server.requests[1]) == ["error: invalid tool call. Use one of bash, write_file."]


def test_compacts_when_the_context_grows_over_the_limit(tmp_path):
    script = [
        use(("bash", {"command": "echo 12345678901234567890"}), tokens=95),
        say("the number is 1"),
        use(("bash", {"command": "true"}), tokens=50),
        say("ok"),
    ]
    with ScriptedModelServer(script) as server:
        assert run_scout(server, tmp_path, "--context-limit", "100").stdout == "ok\n"
    roles = [[m["role"] for m in r["messages"]] for r in server.requests]
    assert roles[1] == ["system", "user", "assistant", "tool", "user"]
    assert server.requests[1]["messages"][-1]["content"] == "Summarize the work so far."
    assert server.requests[1]["messages"][:4] == [*server.requests[0]["messages"], *server.requests[1]["messages"][2:4]]
    fresh = "do it\n\nSummary of the work so far:\nthe number is 1"
    assert [m["content"] for m in server.requests[2]["messages"]][1:] == [fresh]
    assert len(server.requests) == 4


def test_compacts_once_when_the_server_finds_the_context_too_long(tmp_path):
    refused = fail(400, '{"error": {"message": "This model\'s maximum context length is 9 tokens"}}')
    script = [use(("bash", {"command": "seq 1 900"})), refused, say("many numbers"), say("ok")]
    with ScriptedModelServer(script) as server:
        assert run_scout(server, tmp_path).stdout == "ok\n"
    assert len(tool_results(server.requests[2])[0]) == 200
    assert server.requests[3]["messages"][1]["content"].endswith("many numbers")


def test_a_context_that_is_always_too_long_ends_scout(tmp_path):
    with ScriptedModelServer([fail(400, "context length exceeded")]) as server:
        run = run_scout(server, tmp_path)
    assert run.returncode == 4
    assert "too long" in run.stderr
    assert len(server.requests) == 1


@pytest.mark.parametrize("stream", [(), ("--stream",)], ids=["whole", "streamed"])
def test_failed_calls_are_repeated_unchanged(tmp_path, stream):
    script = [fail(503), "drop", fail(429, headers={"retry-after": "0.1"}), say("ok")]
    with ScriptedModelServer(script) as server:
        run = run_scout(server, tmp_path, *stream)
    assert run.returncode == 0
    assert run.stdout == "ok\n"
    assert all(r == server.requests[0] for r in server.requests)
    assert len(server.requests) == 4
    assert "retry in 0.10 s" in run.stderr


def test_gives_up_after_the_last_retry(tmp_path):
    with ScriptedModelServer([fail(500)]) as server:
        run = run_scout(server, tmp_path, "--max-retries", "1")
    assert run.returncode == 3
    assert "gave up after 2 tries: HTTP 500" in run.stderr
    assert len(server.requests) == 2


def test_a_refusal_is_not_repeated(tmp_path):
    with ScriptedModelServer([fail(401, "who are you")]) as server:
        run = run_scout(server, tmp_path)
    assert run.returncode == 4
    assert "who are you" in run.stderr
    assert len(server.requests) == 1


def test_the_turn_limit_ends_the_run_in_order(tmp_path):
    with ScriptedModelServer([use(("bash", {"command": "true"}))]) as server:
        run = run_scout(server, tmp_path, "--max-turns", "3")
    assert run.returncode == 0
    assert len(server.requests) == 3
    assert "turn limit" in run.stderr


def test_instruction_from_a_file_and_usage_errors(tmp_path):
    (tmp_path / "i.md").write_text("read me\n")
    base = [sys.executable, "-I", "-S", str(SCOUT), "--model", "m"]
    with ScriptedModelServer([say("ok")]) as server:
        environment = {"OPENAI_BASE_URL": server.url}
        good = subprocess.run([*base, "--instruction-file", "i.md"], cwd=tmp_path, env=environment, capture_output=True)
        assert good.returncode == 0
        assert server.requests[0]["messages"][1]["content"] == "read me"
        for wrong in ([], ["x", "--instruction-file", "i.md"], ["--instruction-file", "missing"]):
            run = subprocess.run([*base, *wrong], cwd=tmp_path, env=environment, capture_output=True)
            assert run.returncode == 2
