"""`cells.kv_stale: keep`: new weights under a live call in a real engine, against a reference that does it by hand.

The weights come the way a standalone engine gets them: published by another process, pulled and put in by a receiver.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.cell_agent.engine.kv_client import KvClient
from services.cell_agent.engine.server import Engine, EngineFailed, spec_of
from services.cell_agent.trainer import protocol
from services.cell_agent.trainer.launcher import TrainerFailed, TrainerHandle, launch
from services.cell_agent.transfer.mooncake import TransferSession
from services.cell_agent.transfer.weights import Snapshot, Snapshots
from shared.config import CellsConfig
from tests.cell_agent.engine.test_kv_handover import PAGE, SECRET, Call, at_rest, prompt
from tests.cell_agent.trainer.forest import run_config, write_model

TOKENS = 1500


class Switching:
    """Two models; the weights change after `switch` tokens of an answer, the keys and values until then stay."""

    def __init__(self, old: Path, new: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.old, self.new = (AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in (old, new))

    def all_new(self, call: Call) -> Tensor:
        with torch.no_grad():
            logits = self.new(torch.tensor([call.ids + call.output])).logits[0]
        return logits[len(call.ids) - 1 : -1].float().log_softmax(-1)

    def logp(self, call: Call, switch: int) -> Tensor:
        """[tokens of the output, vocabulary]. The last token that the old weights sampled is the first that the new
        ones compute: a token gets its keys and values when the next is sampled."""
        ids, whole, start = call.ids, call.ids + call.output, len(call.ids) + switch - 1
        with torch.no_grad():
            before = self.old(torch.tensor([whole[:start]]), use_cache=True)
            after = self.new(torch.tensor([whole[start:]]), past_key_values=before.past_key_values)
            logits = torch.cat([before.logits[0], after.logits[0]])
        return logits[len(ids) - 1 : -1].float().log_softmax(-1)


def publish(snapshots: Snapshots, folder: Path, version: int) -> Snapshot:
    """As a trainer names and orders them: the tied head is not there."""
    from transformers import AutoModelForCausalLM

    weights = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    with torch.no_grad():
        return snapshots.publish(version, shapes, torch.float32, weights.items())


async def refit(receiver: TrainerHandle, session: TransferSession, snapshot: Snapshot, url: str) -> None:
    place = {"session": session.address, "address": snapshot.buffer.data_ptr(), "nbytes": snapshot.buffer.nbytes}
    what = {"version": snapshot.version, "tensors": snapshot.tensors, "digest": snapshot.digest}
    what |= {"chunk_bytes": snapshot.chunk_bytes, "chunks": snapshot.chunks}
    await receiver.call(protocol.Pull(id=0, **place, **what, load=False))
    done = await receiver.call(protocol.Refit(id=0, engine_url=url, version=snapshot.version))
    assert isinstance(done, protocol.Done)
    print("REFIT", done.metrics)


def matches(call: Call, wanted: Tensor) -> float:
    """Greedy choices must be the reference's; the largest difference of log-probabilities."""
    output = torch.tensor(call.output)
    assert torch.equal(wanted.argmax(-1), output)
    return float((wanted.gather(1, output[:, None])[:, 0] - torch.tensor(call.logprobs)).abs().max())


@pytest.mark.engine
@pytest.mark.timeout(420)
async def test_under_keep_a_live_call_goes_on_with_its_old_pages_and_new_calls_do_not(tmp_path: Path) -> None:
    old, new = write_model(tmp_path / "old"), write_model(tmp_path / "new", seed=1)
    cells = CellsConfig(count=1, standalone=1, capacity=4, engine_tokens=16384, engine_page=PAGE, kv_stale="keep")
    config = run_config(old, cells)
    receiver, engine = await asyncio.gather(
        launch(cell=1, config=config, run_dir=tmp_path, log_path=tmp_path / "receiver.log", trains=False),
        Engine.start(spec_of(config, 1, "cpu", SECRET), tmp_path / "engine.log"),
    )
    kv, session = KvClient(SECRET, always=True), TransferSession("127.0.0.1")
    reference = Switching(old, new)
    try:
        ids = prompt(5, 200)
        await Call(engine.url, ids, 4).done  # its pages stay in the cache
        call = Call(engine.url, ids, TOKENS)
        await call.started.wait()
        await refit(receiver, session, publish(Snapshots(session), new, 1), engine.url)
        assert not call.done.done(), "the call should have been running during the refit"
        fresh = Call(engine.url, ids, 8)
        await fresh.done
        assert fresh.meta["cached_tokens"] == 0
        assert matches(fresh, reference.all_new(fresh)) < 1e-4, "pages of older weights were hit"
        await call.done
        spans = call.meta["weight_versions"]
        assert [(s["version"], s["end"]) for s in spans] == [("0", spans[0]["end"]), ("1", TOKENS)]
        switch = spans[1]["start"]
        assert 0 < switch == spans[0]["end"] < TOKENS
        assert matches(call, reference.logp(call, switch)) < 1e-4
        assert (await at_rest(kv, engine.url)).counts["calls_on_older_pages"] >= 1
        again = Call(engine.url, ids + call.output, 4)  # all that the call left in the cache is of its old namespace
        await again.done
        assert again.meta["cached_tokens"] <= len(ids) + len(fresh.output)
        assert matches(again, reference.all_new(again)) < 1e-4
        with pytest.raises(TrainerFailed, match="version 7"):
            await receiver.call(protocol.Refit(id=0, engine_url=engine.url, version=7))
        assert len(await Call(engine.url, ids, 4).done) == 4
    finally:
        await kv.close()
        session.close()
        await receiver.close()
        await engine.stop()


@pytest.mark.slow
@pytest.mark.engine
async def test_an_engine_that_cannot_tell_older_pages_from_fresh_does_not_start_under_keep(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    cells = CellsConfig(count=1, engine_tokens=4096, kv_stale="keep", engine_args=("--disable-radix-cache",))
    with pytest.raises(EngineFailed, match=r"set cells\.kv_stale to drop"):
        await Engine.start(spec_of(run_config(model, cells), 0, "cpu", SECRET), tmp_path / "engine.log")
