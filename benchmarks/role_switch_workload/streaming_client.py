"""The harness of benchmarks/role_switch.py: makes streaming calls and says how long their events let it wait.

    streaming_client.py BASE_URL KEY MODEL EXECUTION CALLS WORDS

One line for each call on stdout: GAPS {"call", "events", "longest_s", "seconds"}, `longest_s` being the longest time
between two events of the stream after its first one. Leaves a score for the task's test. Runs inside the sandbox:
standard library only.
"""

import hashlib
import http.client
import itertools
import json
import random
import sys
import time
import urllib.parse


def call(base_url, key, model, prompt):
    """One call, read event by event; id of the call, times of its events."""
    url = urllib.parse.urlsplit(base_url)
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=600)
    body = {"model": model, "stream": True, "messages": [{"role": "user", "content": prompt}]}
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection.request("POST", f"{url.path}/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"the proxy answered {response.status}: {response.read()[:300]}")
    name, times = "", []
    for line in response:
        if line.startswith(b"data: {"):
            times.append(time.monotonic())
            name = name or json.loads(line[6:]).get("id", "")
        elif line.startswith(b":"):  # a comment that keeps the connection alive is an event, too
            times.append(time.monotonic())
    connection.close()
    return name.removeprefix("chatcmpl-"), times


def main():
    base_url, key, model, execution, calls, words = sys.argv[1:7]
    draw = random.Random(execution)
    vocabulary = ["read", "write", "file", "test", "value", "list", "name", "line", "error", "result"]
    for number in range(int(calls)):
        prompt = f"{execution} {number} " + " ".join(draw.choice(vocabulary) for _ in range(int(words)))
        started = time.monotonic()
        name, times = call(base_url, key, model, prompt)
        gaps = [b - a for a, b in itertools.pairwise(times)]
        told = {"call": name, "events": len(times), "longest_s": max(gaps, default=0.0)}
        print("GAPS " + json.dumps(told | {"seconds": time.monotonic() - started}), flush=True)
    with open("score", "w") as file:
        file.write(str(hashlib.sha256(execution.encode()).digest()[0] % 2))


main()
