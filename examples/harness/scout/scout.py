#!/usr/bin/env python3
"""scout: a small coding agent for the command line, standard library only.

It speaks OpenAI Chat Completions to whatever answers at OPENAI_BASE_URL and works in the current folder. This file owns
the whole program: the model client, the tools, the loop, compaction and sub-agents.

Invariants: a conversation only ever grows at its end, or is replaced as a whole by compaction; every tool call in an
assistant message gets exactly one tool message, in call order; what the model said is sent back byte for byte.
Imports that cost time are done where they are needed: start-up counts when thousands of short runs are started.
"""

import json
import os
import sys
import time

SYSTEM = "You are a coding agent. Work in the current folder with the tools. Stop when the task is done."
SUMMARY_REQUEST = "Summarize the work so far."
SUMMARY_HEADER = "\n\nSummary of the work so far:\n"
TURN_LIMIT_NOTE = "turn limit reached"
TOOL_OUTPUT_LIMIT = 4000  # characters of a command's output that the model gets to see
SHORTENED_RESULT = 200  # characters of a tool result that survive when the server says the context is too long
CHARS_PER_TOKEN = 2  # for text that the server hasn't counted yet; rather too few than too many
EXIT_GAVE_UP, EXIT_REFUSED, EXIT_USAGE = 3, 4, 2


def _tool(name, description, argument_names):
    properties = {key: {"type": "string"} for key in argument_names}
    schema = {"type": "object", "properties": properties, "required": list(argument_names)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


BASH = _tool("bash", "Run a shell command.", ("command",))
WRITE_FILE = _tool("write_file", "Write a file.", ("path", "content"))
DELEGATE = _tool("delegate", "Hand a task to a sub-agent.", ("task",))


class ModelError(Exception):
    """The model server can't be used any more; `exit_code` says how scout ends."""

    exit_code = EXIT_REFUSED


class GaveUp(ModelError):
    """Retries are used up."""

    exit_code = EXIT_GAVE_UP


class ContextTooLong(ModelError):
    """The server refused the conversation for its length."""


class TryAgain(Exception):
    """A call failed in a way that may pass; `after` is the server's wish in seconds, or None."""

    def __init__(self, reason, after=None):
        super().__init__(reason)
        self.after = after


class Settings:
    """What the command line said; read-only once parsed."""

    def __init__(self, args):
        self.model = args.model
        self.max_turns = args.max_turns
        self.context_limit = args.context_limit
        self.max_output_tokens = args.max_output_tokens
        self.subagents = not args.no_subagents
        self.parallel = args.parallel
        self.stream = args.stream
        self.max_retries = args.max_retries
        self.request_timeout = args.request_timeout
        self.command_timeout = args.command_timeout
        self.quiet = args.quiet

    def log(self, text):
        """Progress goes to stderr; stdout holds the agent's last words only."""
        if not self.quiet:
            print("scout: " + text, file=sys.stderr)


# ---- the model client ----------------------------------------------------------------------------------------------


def complete(settings, messages, tools):
    """One model call with retries. Returns (assistant message, total tokens that the server counted, or 0)."""
    body = {"model": settings.model, "messages": messages, "tools": tools}
    if settings.max_output_tokens:
        body["max_tokens"] = settings.max_output_tokens
    if settings.stream:
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
    payload = json.dumps(body).encode()
    for attempt in range(settings.max_retries + 1):
        try:
            return _post(settings, payload)
        except TryAgain as error:
            if attempt == settings.max_retries:
                raise GaveUp(f"gave up after {attempt + 1} tries: {error}") from None
            wait = min(8.0, 0.25 * 2**attempt) if error.after is None else min(60.0, error.after)
            settings.log(f"retry in {wait:.2f} s: {error}")
            time.sleep(wait)


def _connect(settings):
    """Returns (connection, path prefix, API key) for the configured server."""
    import http.client
    from urllib.parse import urlsplit

    base = os.environ.get("OPENAI_BASE_URL", "https://api.openai.com/v1")
    url = urlsplit(base)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ModelError(f"OPENAI_BASE_URL is no http(s) URL: {base!r}")
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    connection = kind(url.hostname, url.port, timeout=settings.request_timeout)
    return connection, url.path.rstrip("/"), os.environ.get("OPENAI_API_KEY", "")


def _post(settings, payload):
    import http.client

    connection, prefix, key = _connect(settings)
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + key}
    try:
        connection.request("POST", prefix + "/chat/completions", payload, headers)
        response = connection.getresponse()
        if response.status == 200 and settings.stream:
            return _read_stream(response)
        data = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise TryAgain(f"{type(error).__name__}: {error}") from None
    finally:
        connection.close()
    if response.status != 200:
        _raise_for_status(response.status, response.headers, data.decode("utf-8", "replace"))
    return _read_reply(data)


def _raise_for_status(status, headers, text):
    lowered = text.lower()
    if status == 400 and "context" in lowered and any(w in lowered for w in ("length", "long", "maximum", "exceed")):
        raise ContextTooLong("the context is too long: " + text[:300])
    if status in (408, 409, 429) or status >= 500:
        try:
            after = float(headers.get("retry-after", ""))
        except ValueError:
            after = None
        raise TryAgain(f"HTTP {status}: {text[:200]}", after)
    raise ModelError(f"HTTP {status}: {text[:300]}")


def _read_reply(data):
    try:
        reply = json.loads(data)
        message = reply["choices"][0]["message"]
    except (ValueError, LookupError, TypeError):
        raise TryAgain(f"not a chat completion: {data[:200]!r}") from None
    return _assistant(message.get("content"), message.get("tool_calls")), _total(reply)


def _read_stream(response):
    """Server-sent chunks to one message. A stream that ends without [DONE] counts as a failed call."""
    content, calls, total = None, {}, 0
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return _assistant(content, [calls[i] for i in sorted(calls)]), total
        try:
            chunk = json.loads(data)
        except ValueError:
            raise TryAgain(f"a chunk is no JSON: {data[:200]!r}") from None
        if "error" in chunk:
            raise TryAgain(f"error in the stream: {json.dumps(chunk['error'])[:200]}")
        total = _total(chunk) or total
        for choice in chunk.get("choices") or []:
            delta = choice.get("delta") or {}
            if delta.get("content") is not None:
                content = (content or "") + delta["content"]
            for part in delta.get("tool_calls") or []:
                _add_call_part(calls, part)
    raise TryAgain("the stream ended early")


def _add_call_part(calls, part):
    call = calls.setdefault(
        part.get("index", 0), {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
    )
    call["id"] = part.get("id") or call["id"]
    function = part.get("function") or {}
    call["function"]["name"] += function.get("name") or ""
    call["function"]["arguments"] += function.get("arguments") or ""


def _assistant(content, calls):
    message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = calls
    return message


def _total(reply):
    return (reply.get("usage") or {}).get("total_tokens") or 0


# ---- the tools -----------------------------------------------------------------------------------------------------


def run_bash(settings, arguments):
    """Runs a shell command in the current folder; it neither sees scout's API key nor outlives its time limit."""
    import signal
    import subprocess

    environment = {k: v for k, v in os.environ.items() if k != "OPENAI_API_KEY"}
    process = subprocess.Popen(
        ["/bin/sh", "-c", arguments["command"]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )
    try:
        output, note = process.communicate(timeout=settings.command_timeout)[0], ""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, note = process.communicate()[0], f"[stopped after {settings.command_timeout:g} s]"
    text = output.decode("utf-8", "replace")
    if len(text) > TOOL_OUTPUT_LIMIT:
        text = text[:TOOL_OUTPUT_LIMIT] + f"\n[{len(text) - TOOL_OUTPUT_LIMIT} more characters]"
    if process.returncode and not note:
        note = f"[exit {process.returncode}]"
    return text + note if text or note else "(no output)"


def write_file(_settings, arguments):
    """Writes a file, with the folders above it."""
    path = arguments["path"]
    folder = os.path.dirname(path)
    if folder:
        os.makedirs(folder, exist_ok=True)
    with open(path, "w", encoding="utf-8", errors="surrogatepass") as file:
        file.write(arguments["content"])
    return "wrote " + path


TOOL_BODIES = {"bash": run_bash, "write_file": write_file}


def valid_arguments(call, tools):
    """The call's arguments if it names one of `tools` and has all its arguments as strings, else None."""
    function = call.get("function") or {}
    for tool in tools:
        if tool["function"]["name"] == function.get("name"):
            try:
                arguments = json.loads(function.get("arguments") or "")
            except (ValueError, TypeError):
                return None
            wanted = tool["function"]["parameters"]["required"]
            if isinstance(arguments, dict) and all(isinstance(arguments.get(key), str) for key in wanted):
                return arguments
    return None


# ---- the agent -----------------------------------------------------------------------------------------------------


class Agent:
    """One context: a conversation about one task. A sub-agent is another Agent without the delegate tool.

    `model(messages, tools)` is a model call and `bodies` are the tools' functions, so that both can be replaced.
    """

    def __init__(self, settings, task, model=None, bodies=None, is_subagent=False):
        self.settings = settings
        self.task = task
        self.model = model or (lambda messages, tools: complete(settings, messages, tools))
        self.bodies = bodies or TOOL_BODIES
        self.tools = [BASH, WRITE_FILE]
        if settings.subagents and not is_subagent:
            self.tools.append(DELEGATE)
        self.messages = opening(task)
        self.used = 0  # tokens of the conversation: counted by the server, plus an estimate for what came after

    def run(self):
        """Works until the model stops calling tools; returns its last words."""
        for _turn in range(self.settings.max_turns):
            limit = self.settings.context_limit
            if limit and self.used > limit and len(self.messages) > 2:
                self.compact(self.messages)
            reply = self.ask()
            calls = reply.get("tool_calls")
            if not calls:
                return reply.get("content") or ""
            for call, result in zip(calls, self.results(calls), strict=False):
                self.messages.append({"role": "tool", "tool_call_id": call.get("id") or "", "content": result})
                self.used += len(result) // CHARS_PER_TOKEN
        self.settings.log(TURN_LIMIT_NOTE)
        return TURN_LIMIT_NOTE

    def ask(self):
        """One turn of the model, appended to the conversation; compacts once if the server finds it too long."""
        try:
            reply, self.used = self.model(self.messages, self.tools)
        except ContextTooLong:
            if len(self.messages) <= 2:
                raise
            self.compact(shortened(self.messages))
            reply, self.used = self.model(self.messages, self.tools)
        self.messages.append(reply)
        return reply

    def compact(self, messages):
        """Replaces the conversation by the task and the model's own summary of `messages`."""
        request = {"role": "user", "content": SUMMARY_REQUEST}
        reply, _ = self.model([*messages, request], self.tools)
        self.settings.log(f"compacted {len(messages)} messages")
        self.messages = opening(self.task + SUMMARY_HEADER + (reply.get("content") or "(none)"))
        self.used = 0

    def results(self, calls):
        """The results of one turn's calls, in their order."""
        if not self.settings.parallel or len(calls) == 1:
            return [self.result(call) for call in calls]
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(len(calls)) as pool:
            return list(pool.map(self.result, calls))

    def result(self, call):
        """Carries one call out. Whatever is wrong with it is the model's to read, not a reason to stop."""
        arguments = valid_arguments(call, self.tools)
        if arguments is None:
            names = [tool["function"]["name"] for tool in self.tools]
            return f"error: invalid tool call. Use one of {', '.join(names)}."
        name = call["function"]["name"]
        if name == "delegate":
            return Agent(self.settings, arguments["task"], self.model, self.bodies, is_subagent=True).run()
        try:
            return self.bodies[name](self.settings, arguments)
        except (OSError, ValueError) as error:
            return f"error: {error}"


def opening(task):
    """A fresh conversation."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task}]


def shortened(messages):
    """The conversation with its tool results cut, for a summary call that must fit where the whole did not."""
    return [dict(m, content=m["content"][:SHORTENED_RESULT]) if m["role"] == "tool" else m for m in messages]


# ---- the command line ----------------------------------------------------------------------------------------------


def parse(argv):
    """Command line to (settings, instruction)."""
    import argparse

    parser = argparse.ArgumentParser(prog="scout", description="A small coding agent for the current folder.")
    parser.add_argument("instruction", nargs="?")
    parser.add_argument("--instruction-file", help="read the instruction from a file")
    parser.add_argument("--model", required=True)
    parser.add_argument("--max-turns", type=int, default=30, help="model turns per agent")
    parser.add_argument("--context-limit", type=int, default=0, metavar="TOKENS", help="compact above this; 0: never")
    parser.add_argument(
        "--max-output-tokens", type=int, default=0, metavar="TOKENS", help="per call; 0: server's choice"
    )
    parser.add_argument("--no-subagents", action="store_true", help="leave the delegate tool out")
    parser.add_argument("--parallel", action="store_true", help="run the tool calls of one turn at the same time")
    parser.add_argument("--stream", action="store_true", help="ask for streamed replies")
    parser.add_argument("--max-retries", type=int, default=8)
    parser.add_argument("--request-timeout", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument("--command-timeout", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    args = parser.parse_args(argv)
    if (args.instruction is None) == (args.instruction_file is None):
        parser.error("give either an instruction or --instruction-file")
    if args.instruction is None:
        try:
            with open(args.instruction_file, encoding="utf-8") as file:
                args.instruction = file.read()
        except (OSError, ValueError) as error:
            parser.error(f"--instruction-file: {error}")
    return Settings(args), args.instruction.strip()


def main(argv):
    settings, instruction = parse(argv)
    try:
        print(Agent(settings, instruction).run())
    except ModelError as error:
        print(f"scout: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
