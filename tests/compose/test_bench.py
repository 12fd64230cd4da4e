"""`pageferry bench`: against a server of our own whose timing and mistakes are known."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from pageferry.compose import bench, bench_client
from pageferry.compose.bench_client import Load, Server, Unusable, discover, run
from pageferry.compose.bench_workload import Request

GAP_S = 0.02


class Fake:
    """An OpenAI-compatible server that streams `max_tokens` tokens, `GAP_S` apart."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.refuse: set[str] = set()
        """Fields that give 400; "ids" for prompts as token ids."""
        self.per_chunk = 1
        self.fail_at = ""
        """"status", "event" or "middle": how every third request fails."""
        self.busy = asyncio.Lock()
        self.serial = False
        """One request at a time: the others wait."""
        self.hangs_up = False
        """Closes the connection 10 ms after an answer, without saying so."""

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake", "max_model_len": 4096}]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        asked = {**body, **body.get("stream_options", {})}
        if isinstance(body.get("prompt"), list):
            asked["ids"] = True
        if refused := self.refuse & asked.keys():
            return web.json_response({"error": f"no {refused}"}, status=400)
        self.bodies.append(body)
        fails = self.fail_at and len(self.bodies) % 3 == 0
        if fails and self.fail_at == "status":
            return web.json_response({"error": "full"}, status=429)
        if self.serial:
            async with self.busy:
                return await self.stream(request, body, fails)
        return await self.stream(request, body, bool(fails))

    async def stream(self, request: web.Request, body: dict[str, Any], fails: Any) -> Any:
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        counted = body["stream_options"].get("continuous_usage_stats")
        words = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        size = len(words) if isinstance(words, list) else 2 * len(words.split())
        sent, total = 0, body["max_tokens"]
        while sent < total:
            await asyncio.sleep(GAP_S)
            count = min(self.per_chunk, total - sent)
            sent += count
            choice: dict[str, Any] = {"text": "x" * count, "finish_reason": None}
            if "messages" in body:
                choice = {"delta": {"content": "x" * count}, "finish_reason": None}
            chunk: dict[str, Any] = {"choices": [choice], "usage": None}
            if counted:
                chunk["usage"] = {"completion_tokens": sent, "prompt_tokens": size}
            if sent == total:
                choice["finish_reason"] = "length"
            if fails and self.fail_at == "event":
                chunk = {"error": {"message": "worker lost"}}
            if fails and self.fail_at == "middle":
                break
            await reply.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            if "error" in chunk:
                return reply
        if not fails:
            usage = {"completion_tokens": sent, "prompt_tokens": size}
            last = json.dumps({"choices": [], "usage": usage})
            await reply.write(f"data: {last}\n\ndata: [DONE]\n\n".encode())
        if self.hangs_up and request.transport is not None:
            await reply.write_eof()
            asyncio.get_running_loop().call_later(0.01, request.transport.abort)
        return reply


@pytest.fixture
async def fake() -> AsyncIterator[tuple[Fake, str]]:
    server = Fake()
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/completions", server.completions)
    app.router.add_post("/v1/chat/completions", server.completions)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    yield server, f"http://{host}:{port}"
    await runner.cleanup()


async def test_discovery_finds_model_context_and_what_is_taken(fake):
    server, url = fake
    found = await discover(Server(url))
    assert (found.model, found.max_model_len) == ("fake", 4096)
    assert found.ids
    assert found.exact
    assert found.counted

    server.refuse = {"ids", "continuous_usage_stats", "ignore_eos"}
    found = await discover(Server(url))
    assert (found.ids, found.exact, found.counted) == (False, False, False)
    assert found.tokens_per_word == pytest.approx(2.0)

    server.refuse = {"model"}
    with pytest.raises(Unusable, match="takes no completion: HTTP 400"):
        await discover(Server(url))
    with pytest.raises(Unusable, match="does not serve other"):
        await discover(Server(url, model="other"))
    with pytest.raises(Unusable, match="ClientConnectorError"):
        await discover(Server("http://127.0.0.1:9"))


async def test_closed_loop_keeps_so_many_streams_and_sends_each_request_once(fake):
    server, url = fake
    found = await discover(Server(url))
    server.bodies.clear()
    requests = tuple(Request(4 + i, 3) for i in range(10))
    result = await run(found, Load(requests, 3, key="a"))
    assert sorted(len(b["prompt"]) for b in server.bodies) == [4 + i for i in range(10)]
    assert len({tuple(b["prompt"]) for b in server.bodies}) == 10
    lengths = {(b["ignore_eos"], b["min_tokens"], b["max_tokens"]) for b in server.bodies}
    assert lengths == {(True, 3, 3)}
    figures = bench.summarise(result, bench.Slo())
    assert (figures.completed, figures.failed, figures.short) == (10, 0, 0)
    assert figures.max_concurrent_requests == 3
    assert figures.total_output_tokens == 30
    assert figures.total_input_tokens == sum(4 + i for i in range(10))
    assert all(o.sent_s >= o.due_s for o in result.outcomes)


async def test_a_server_may_close_connections_between_requests(fake):
    server, url = fake
    found = await discover(Server(url))
    server.hangs_up = True
    result = await run(found, Load((Request(4, 2),) * 6, 2, key="a"))
    assert [o.error for o in result.outcomes] == [""] * 6


async def test_open_loop_counts_waiting_from_when_a_request_was_due(fake):
    server, url = fake
    found = await discover(Server(url))
    server.serial = True
    due = [0.0, 0.01, 0.02]
    requests = tuple(Request(4, 5, at) for at in due)
    result = await run(found, Load(open=requests, key="b"))
    ends = sorted(o.end_s for o in result.outcomes)
    assert [o.due_s for o in result.outcomes] == pytest.approx(due)
    for earlier, later in itertools.pairwise(ends):
        assert later - earlier >= 5 * GAP_S  # they really queued
    third = max(result.outcomes, key=lambda o: o.chunks[0][0])
    figures = bench.summarise(result, bench.Slo())
    assert figures.ttft_ms.max == pytest.approx((third.chunks[0][0] - third.due_s) * 1e3)
    assert figures.ttft_ms.max >= 1e3 * 11 * GAP_S - 20  # 5 + 5 gaps in front of it, one of its own


async def test_a_load_with_a_time_limit_repeats_and_cuts(fake):
    _, url = fake
    found = await discover(Server(url))
    result = await run(found, Load((Request(4, 5),), 2, seconds=0.5, key="c"))
    assert len(result.outcomes) > 3
    cut = [o for o in result.outcomes if o.cut]
    assert 1 <= len(cut) <= 2
    figures = bench.summarise(result, bench.Slo())
    assert figures.failed == 0
    assert figures.total_output_tokens == sum(o.output_tokens for o in result.outcomes)


async def test_several_tokens_in_a_chunk_are_counted(fake):
    server, url = fake
    server.per_chunk = 2
    found = await discover(Server(url))
    (seen,) = (await run(found, Load((Request(4, 5),), 1, key="d"))).outcomes
    assert [tokens for _, tokens in seen.chunks] == [2, 2, 1]


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("status", 'HTTP 429: {"error": "full"}'),
        ("event", "error event: {'message': 'worker lost'}"),
        ("middle", "the stream ended without finish_reason and [DONE]"),
    ],
)
async def test_failures_are_counted_by_reason(fake, how, reason):
    server, url = fake
    found = await discover(Server(url))
    server.fail_at, server.bodies = how, []
    result = await run(found, Load((Request(4, 2),) * 6, 1, key="e"))
    figures = bench.summarise(result, bench.Slo(ttft_ms=60_000))
    assert (figures.completed, figures.failed) == (4, 2)
    assert figures.errors == {reason: 2}
    assert figures.good_share == pytest.approx(4 / 6)
    assert reason in bench.report(figures, bench.Slo())


async def test_chat_and_key_are_sent_and_the_key_is_not_written(fake, tmp_path, capsys):
    server, url = fake
    out = tmp_path / "out.json"
    flags = f"--url {url}/v1/ --chat --api-key sesame --requests 4 --concurrency 2 --json {out}"
    code = await asyncio.to_thread(
        bench.main, [*flags.split(), "--prompt-scale", "0.01", "--output-scale", "0.01"]
    )
    assert code == 0
    assert all("messages" in body for body in server.bodies)
    assert "sesame" not in out.read_text()
    written = json.loads(out.read_text())
    assert written["figures"]["completed"] == len(written["requests"]) == 4
    table = capsys.readouterr().out
    assert "4 ok, 0 failed" in table
    assert "TTFT, ms" in table


async def test_replay_of_a_trace_and_poisson_arrivals(fake, tmp_path):
    _, url = fake
    trace = tmp_path / "t.jsonl"
    rows = [{"timestamp": 100 * i, "input_length": 5 + i, "output_length": 2} for i in range(3)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "out.json"
    common = ["--url", url, "--json", str(out), "--trace", str(trace)]
    assert await asyncio.to_thread(bench.main, [*common, "--replay", "--speed", "2"]) == 0
    due = [o["due_s"] for o in json.loads(out.read_text())["requests"]]
    assert sorted(due) == pytest.approx([0, 0.05, 0.1])
    assert await asyncio.to_thread(bench.main, [*common, "--rate", "50"]) == 0
    written = json.loads(out.read_text())
    assert written["figures"]["completed"] == 3
    assert "Poisson" in written["load"]


async def test_what_cannot_be_used_is_exit_code_2(fake, tmp_path, capsys):
    _, url = fake
    mistakes = (
        ["--replay"],
        ["--trace", str(tmp_path / "none.csv")],
        ["--model", "other"],
        ["--json", str(tmp_path / "no" / "out.json")],
    )
    for flags in mistakes:
        assert await asyncio.to_thread(bench.main, ["--url", url, *flags]) == 2
    said = capsys.readouterr().err
    assert "--replay needs --trace" in said
    assert "none.csv: cannot be read" in said
    assert "does not serve other" in said
    assert "there is no folder" in said
    with pytest.raises(SystemExit):
        bench.main(["--url", url, "--rate", "2", "--concurrency", "2"])


async def test_sigint_cuts_and_shows_what_is_there(fake, tmp_path):
    """A program of its own, whose stderr is no terminal: a line of progress, then SIGINT."""
    _, url = fake
    out = tmp_path / "out.json"
    flags = ["--url", url, "--requests", "400", "--concurrency", "2", "--json", str(out)]
    source = (
        "import sys; from pageferry.compose import bench; bench.PROGRESS_S = 0.1;"
        f"sys.exit(bench.main({[*flags, '--output-scale', '0.01']!r}))"
    )
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
    program = await asyncio.create_subprocess_exec(sys.executable, "-c", source, **pipes)
    async with asyncio.timeout(30):
        assert program.stderr is not None
        while b" 0 of 400" in (line := await program.stderr.readline()) or b" s: " not in line:
            assert line
        program.send_signal(signal.SIGINT)
        table, said = await program.communicate()
    assert b" of 400 requests done, " in line
    assert b"tokens/s so far" in line
    assert (program.returncode, b"Traceback" in said) == (130, False)
    written = json.loads(out.read_text())
    figures = written["figures"]
    assert written["interrupted"]
    assert figures["completed"] >= 1
    assert figures["cut"] == 2
    first, second, *_ = table.decode().splitlines()
    sent = figures["completed"] + 2
    assert first == f"INTERRUPTED          {sent} of 400 requests had been sent"
    assert second.endswith(f"{figures['completed']} ok, 0 failed, 2 cut off at the end")


async def test_a_second_sigint_ends_at_once(fake):
    """While the first one's cutting hangs."""
    _, url = fake
    source = (
        "import asyncio, sys; from pageferry.compose import bench\n"
        "async def hangs(server, load, watch):\n"
        "    await watch.stop.wait(); bench.say('cutting'); await asyncio.sleep(600)\n"
        f"bench.run = hangs; sys.exit(bench.main(['--url', {url!r}]))"
    )
    pipe = asyncio.subprocess.PIPE
    program = await asyncio.create_subprocess_exec(sys.executable, "-c", source, stderr=pipe)
    async with asyncio.timeout(30):
        assert program.stderr is not None
        assert b"closed loop" in await program.stderr.readline()
        program.send_signal(signal.SIGINT)
        assert await program.stderr.readline() == b"cutting\n"
        program.send_signal(signal.SIGINT)
        said = await program.stderr.read()
        assert (await program.wait(), said) == (130, b"pageferry bench: interrupted\n")


def test_a_url_needs_its_scheme(capsys):
    assert bench.main(["--url", "127.0.0.1:8000"]) == 2
    assert "no scheme: write http://127.0.0.1:8000" in capsys.readouterr().err


def test_a_chunk_without_text_that_only_ends_is_no_token():
    has_text = bench_client._has_text
    assert has_text({"text": "a", "finish_reason": None}) == 1
    assert has_text({"text": "", "finish_reason": None}) == 1  # part of a character
    assert has_text({"text": "", "finish_reason": "stop"}) == 0
    assert has_text({"delta": {"role": "assistant", "content": ""}}) == 0
    assert has_text({"delta": {"content": "a"}}) == 1
