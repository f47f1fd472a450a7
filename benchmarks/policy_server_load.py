"""How fast a policy server answers many jobs while it learns.

What it does: starts ``rlfreeze_ds serve`` and asks it as many concurrent jobs would, each over a connection of its own and with a
decision a second (spread evenly, on schedule whatever the answers take); rewards are drawn, so that the policy is updated.

How to run: python benchmarks/policy_server_load.py --json benchmarks/records/policy_server_load.json [-- options of serve]

What to expect: p50 and p99 of the answers, in all and of those that came during an update's second, the server's start, its
memory with all its processes, and how it ended. On 2 cores p99 stays under 250 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jobs import write_record

from rlfreeze_ds.policy.observation import HIGH, LOW

ROOT = Path(__file__).parents[1]


async def job(number: int, port: int, token: str, seconds: float, answers: list[tuple[float, float, int]]) -> None:
    """One job: a session, a window a second, a close. ``answers`` gets (when, seconds, updates) of each."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    draw = random.Random(number)

    async def post(path: str, body: dict) -> dict:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {token}\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        answer = await reader.readuntil(b"\r\n\r\n")
        size = next(int(line.split(b":")[1]) for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length"))
        text = await reader.readexactly(size)
        if b" 200 " not in answer.split(b"\r\n")[0]:
            raise RuntimeError(text.decode())
        return json.loads(text)

    session = (await post("/v1/sessions", {"run_id": f"job-{number}"}))["session_id"]
    begin = time.monotonic() + draw.random()
    reward = None
    for window in range(int(seconds)):
        await asyncio.sleep(max(0.0, begin + window - time.monotonic()))
        started = time.monotonic()
        observation = [draw.uniform(low, high) for low, high in zip(LOW.tolist(), HIGH.tolist(), strict=True)]
        answer = await post(f"/v1/sessions/{session}/act", {"window": window, "observation": observation, "reward": reward})
        answers.append((started, time.monotonic() - started, answer["updates"]))
        reward = answer["action"][0] + draw.gauss(0, 0.1)
    await post(f"/v1/sessions/{session}/close", {"window": int(seconds)})
    writer.close()


async def jobs(num: int, port: int, token: str, seconds: float) -> list[tuple[float, float, int]]:
    answers: list[tuple[float, float, int]] = []
    await asyncio.gather(*(job(number, port, token, seconds, answers) for number in range(num)))
    return answers


def memory(pid: int) -> dict[str, int]:
    """MB of resident memory: of the server, and of it with all below it."""
    sizes, parents = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)], sizes[int(entry.name)] = int(fields[1]), int(fields[21]) * 4096 >> 20
    found, last = {pid}, set()
    while found != last:
        last, found = found, found | {one for one, parent in parents.items() if parent in found}
    return {"server": sizes[pid], "all": sum(sizes[one] for one in found)}


def percentiles(values: list[float]) -> dict[str, float]:
    """Milliseconds."""
    ordered = sorted(values)
    at = {f"p{q}": round(1e3 * ordered[min(len(ordered) - 1, len(ordered) * q // 100)], 1) for q in (50, 99)}
    return {"num": len(ordered), **at, "largest": round(1e3 * ordered[-1], 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-jobs", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", help="where the record goes")
    parser.add_argument("serve", nargs="*", metavar="OPTION", help="after --: options of serve")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        ready, token = Path(name) / "ready", Path(name) / "token"
        command = [sys.executable, "-P", "-m", "rlfreeze_ds", "serve", "--ready-file", str(ready), "--token-file", str(token)]
        started = time.monotonic()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        server = subprocess.Popen([*command, *arguments.serve], env=environment, stdout=sys.stderr)
        while not ready.exists():
            if server.poll() is not None:
                sys.exit("the server did not start")
            time.sleep(0.02)
        start_s = time.monotonic() - started
        port = json.loads(ready.read_text())["port"]
        answers = asyncio.run(jobs(arguments.num_jobs, port, token.read_text().strip(), arguments.seconds))
        resident = memory(server.pid)
        ending = time.monotonic()
        server.terminate()
        code = server.wait(timeout=60)
        end_s = time.monotonic() - ending
    answers.sort()
    # An update ends between two answers of which the later one knows of it; it began in the second before.
    changes = [later[0] for earlier, later in zip(answers, answers[1:], strict=False) if later[2] > earlier[2]]
    during = [one[1] for one in answers if any(change - 1.0 <= one[0] <= change for change in changes)]
    figures = {
        "answers_ms": percentiles([one[1] for one in answers]), "during_updates_ms": percentiles(during) if during else None,
        "updates": answers[-1][2], "start_s": round(start_s, 1), "end_s": round(end_s, 1), "code": code, "memory_mb": resident,
        "load_average": [round(value, 1) for value in os.getloadavg()],
    }  # fmt: skip
    write_record("concurrent jobs are answered while the server learns", "benchmarks/policy_server_load.py", arguments, figures)


if __name__ == "__main__":
    main()
