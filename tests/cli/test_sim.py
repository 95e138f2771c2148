"""`perdure sim run` as a user sees it."""

import json

from typer.testing import CliRunner

from perdure.cli.sim import app

RUN = ["run", "--nodes", "4", "--spares", "1", "--days", "0.5", "--seed", "3", "--mtbf-node", "10"]


def test_sim_run_prints_what_happened_and_where_the_time_went() -> None:
    result = CliRunner().invoke(app, RUN)
    assert result.exit_code == 0, result.output
    assert "seed 3: 5 nodes" in result.output
    assert "effective training time" in result.output


def test_sim_run_prints_one_json_object_with_the_goodput_report_in_it() -> None:
    result = CliRunner().invoke(app, [*RUN, "--json"])
    body = json.loads(result.output)
    assert body["violations"] == []
    assert body["summary"]["seed"] == 3
    assert body["goodput"]["rows"]


def test_sim_run_refuses_a_cluster_without_nodes() -> None:
    assert CliRunner().invoke(app, ["run", "--nodes", "0"]).exit_code == 2
