"""Runner for OpenVINO GenAI's continuous batching, in OpenVINO's own interpreter.

    python run_openvino.py MODEL_DIR SETTINGS_JSON

Protocol and meaning of a load: see `InProcess` in `systems.py`. One thread: between two steps the
requests that are due are added and the tokens of the last step are noted.
"""

from __future__ import annotations

import collections
import json
import sys
import time
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai


def pipeline(model: str, settings: dict[str, Any]) -> genai.ContinuousBatchingPipeline:
    scheduler = genai.SchedulerConfig()
    for name, value in settings["scheduler"].items():
        setattr(scheduler, name, value)
    return genai.ContinuousBatchingPipeline(model, scheduler, "CPU", settings["properties"])


def config(output: int) -> genai.GenerationConfig:
    made = genai.GenerationConfig()
    made.max_new_tokens = made.min_new_tokens = output
    made.ignore_eos = True
    made.do_sample = False
    return made


class Run:
    """One load."""

    def __init__(self, pipe: genai.ContinuousBatchingPipeline, job: dict[str, Any], first_id: int):
        self.pipe, self.job = pipe, job
        self.closed = collections.deque(enumerate(job["closed"]))
        self.open = collections.deque(sorted(enumerate(job["open"]), key=lambda i: i[1]["at_s"]))
        self.active: dict[int, tuple[Any, dict[str, Any], int]] = {}
        self.outcomes: list[dict[str, Any]] = []
        self.next_id = first_id
        self.started = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self.started

    def run(self) -> dict[str, Any]:
        seconds = self.job["seconds"]
        while self.closed or self.open or self.active:
            if seconds is not None and self.now() >= seconds:
                self.cut()
                break
            self.add_due()
            if self.active:
                self.pipe.step()
                self.collect()
            else:
                time.sleep(0.001)
        return {"wall_s": self.now(), "outcomes": self.outcomes}

    def add_due(self) -> None:
        streams = sum(o["kind"] == "closed" for _, o, _ in self.active.values())
        while self.closed and streams < self.job["concurrency"]:
            self.add("closed", *self.closed.popleft(), self.now())
            streams += 1
        while self.open and self.open[0][1]["at_s"] <= self.now():
            self.add("open", *self.open[0], self.open[0][1]["at_s"])
            self.open.popleft()

    def add(self, kind: str, index: int, item: dict[str, Any], due_s: float) -> None:
        ids = ov.Tensor(np.array([item["ids"]], dtype=np.int64))
        outcome = {"kind": kind, "index": index, "due_s": due_s, "chunks": [], "cut": False}
        self.outcomes.append(outcome)
        handle = self.pipe.add_request(self.next_id, ids, config(item["output"]))
        self.active[self.next_id] = (handle, outcome, item["output"])
        self.next_id += 1

    def collect(self) -> None:
        now = self.now()
        for key, (handle, outcome, output) in list(self.active.items()):
            tokens = 0
            while handle.can_read():
                tokens += sum(len(part.generated_ids) for part in handle.read().values())
            if tokens:
                outcome["chunks"].append((now, tokens))
            if sum(n for _, n in outcome["chunks"]) >= output:
                outcome["end_s"] = now
                del self.active[key]

    def cut(self) -> None:
        for handle, outcome, _ in self.active.values():
            outcome["cut"], outcome["end_s"] = True, self.now()
            handle.stop()
        while self.pipe.has_non_finished_requests():
            self.pipe.step()


def main() -> None:
    pipe = pipeline(sys.argv[1], json.loads(sys.argv[2]))
    answers = sys.stdout
    sys.stdout = sys.stderr  # the library prints
    print(json.dumps({"ready": True}), file=answers, flush=True)
    next_id = 0
    for line in sys.stdin:
        run = Run(pipe, json.loads(line), next_id)
        print(json.dumps(run.run()), file=answers, flush=True)
        next_id = run.next_id


if __name__ == "__main__":
    main()
