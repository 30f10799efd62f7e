"""The figures of a run as one plain object: what `gyre up --json` prints and the summary table shows."""

from __future__ import annotations

from typing import Any

from cli.run_view import RunView


def quarter_means(rewards: list[float]) -> tuple[float | None, float | None]:
    """Mean of the first and of the last quarter of the steps (at least one step each)."""
    if not rewards:
        return None, None
    n = max(1, len(rewards) // 4)
    return sum(rewards[:n]) / n, sum(rewards[-n:]) / n


def summarize(view: RunView, *, wall_s: float, peak_rss_bytes: int) -> dict[str, Any]:
    rewards = [b.reward for b in view.committed]
    first, last = quarter_means(rewards)
    staleness = [b.staleness for b in view.committed]
    packed = sum(b.packed_tokens for b in view.committed)
    return {
        "run": view.run,
        "mode": view.mode,
        "phase": view.phase,
        "steps": len(rewards),
        "wall_s": round(wall_s, 2),
        "peak_rss_bytes": peak_rss_bytes,
        "reward_before": view.eval_mean("before", view.main_set),
        "reward_after": view.eval_mean("after", view.main_set),
        "reward_first_quarter": first,
        "reward_last_quarter": last,
        "evaluation": _evaluation(view),
        "mean_staleness": sum(staleness) / len(staleness) if staleness else None,
        "role_switches": view.role_switches,
        "executions": {
            "dispatched": view.dispatched,
            "started": view.started,
            "finished": view.finished,
            "outstanding": view.level,
            "trained": view.trained,
            "evaluated": view.evaluated,
            "excluded": view.excluded,
            "placeholder": view.placeholders,
        },
        "tokens": {
            "generated": sum(view.engine_tokens.values()),
            "recorded": view.tokens_recorded,
            "lost": view.tokens_lost,
            "trained": view.tokens_trained,
            "dedup_factor": sum(b.path_tokens for b in view.committed) / packed if packed else None,
        },
        "model_calls": view.calls,
        "calls_taken_over": view.calls_taken_over,
        "moved_calls": {
            "cut": view.calls_cut,
            **dict(sorted(view.calls_adopted.items())),
            "page_tokens": view.page_tokens,
        },
        "seconds": {k: round(v, 2) for k, v in sorted(view.seconds.items())} | _phase_seconds(view),
        "errors": len(view.errors),
        "policy": view.policy_path,
        "run_dir": view.run_dir,
    }


def _evaluation(view: RunView) -> dict[str, dict[str, Any]]:
    out: dict[str, dict[str, Any]] = {}
    for (phase, name), scores in sorted(view.eval_scores.items()):
        n = len(scores)
        mean = sum(scores) / n
        spread = (sum((s - mean) ** 2 for s in scores) / n) ** 0.5
        out.setdefault(name, {})[phase] = {"mean": mean, "standard_error": spread / n**0.5, "executions": n}
    return out


def _phase_seconds(view: RunView) -> dict[str, float]:
    """Wall time of each run phase, `phase_<name>`."""
    marks = [(view.started_at, "starting"), *((t, p) for t, p in view.phases if p != "starting")]
    ends = [t for t, _ in marks[1:]] + [view.now]
    out: dict[str, float] = {}
    for (start, phase), end in zip(marks, ends, strict=True):
        if phase not in ("finished", "failed"):
            out[f"phase_{phase}"] = round(out.get(f"phase_{phase}", 0.0) + end - start, 2)
    return out
