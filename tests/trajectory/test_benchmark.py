import json

from benchmarks.packing import WORKLOADS, measure


def test_the_benchmark_measures_the_real_core() -> None:
    report = measure("demo", WORKLOADS["demo"], seed=1)
    tokens = json.loads(json.dumps(report))["tokens"]
    assert tokens["packed"] < tokens["paths"]
    assert tokens["trained"] <= tokens["generated"] < tokens["recorded"]
    assert report["over_budget"] == 0
    assert report["fill_rate"] > 0.7
