import json
from pathlib import Path

from mini_rome.events import event_rates
from mini_rome.sandbox.safety import EventLog
from mini_rome.types import SafetyEvent


def test_events_are_counted_per_thousand_episodes_by_kind_and_severity(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "safety.jsonl", "run")
    log.write([SafetyEvent("egress", "high", "command", "curl x"), SafetyEvent("scan", "low", "command", "nmap")])
    log.write([SafetyEvent("egress", "high", "command", "curl y")])
    rates = event_rates(log.path, episodes=500)
    assert rates["by_kind"] == {"egress/high": 4.0, "scan/low": 2.0}
    assert (rates["events"], rates["per_1000_episodes"]) == (3, 6.0)
    json.dumps(rates)


def test_a_run_without_events_has_no_log_and_a_rate_of_zero(tmp_path: Path) -> None:
    assert event_rates(tmp_path / "safety.jsonl", episodes=0)["per_1000_episodes"] == 0
