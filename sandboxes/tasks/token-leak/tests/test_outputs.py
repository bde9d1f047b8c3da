"""What the incident report says, and whether the token is out of use, out of the logs and replaced."""

import configparser
import hashlib
import json
import re

import pytest

OLD_SHA = "a282c93b17faeae90cb61177a400d6dec288d2a112b6a522980f6e255ffb8eb5"
CLEAN = {
    "gateway.log": "73a206f0c63e4f63d65781fefc62ab963ebfccee511ce5783c37278206b09fc6",
    "gateway.log.1": "13a4f3d24d734904dd0db81474f258ee62a9f3b525501a78b9357ba68a64c236",
    "gateway.log.2.gz": "826a9b6a5eb5529094df1b2a6e97d27edd5156a43ee5a0de8a0a30bf42d2e8fa",
    "worker.log": "4cfc8b0bf3c9ea717dc9e94d5821d4402188cfce92e002261328962fce0e0864",
}
REPORTS = {"owner": "reports", "scopes": ["invoices:read", "exports:read"]}
OTHERS = {
    "t-01": ("billing", "active", "ffd4be1417"),
    "t-02": ("reports", "revoked", "94b67bb7ff"),
    "t-04": ("mailer", "active", "76bfa05c46"),
    "t-05": ("ops", "revoked", "6499ce47ce"),
    "t-06": ("ops", "active", "96d1f3b07f"),
}


def sha(text):
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture
def incident(read):
    return json.loads(read("/app/incident.json"))


@pytest.fixture
def tokens(read):
    return {entry["id"]: entry for entry in json.loads(read("/app/service/tokens.json"))["tokens"]}


@pytest.fixture
def new_token(read):
    text = read("/app/service/secrets/reports.token")
    assert re.fullmatch(r"mr_[a-z0-9]{24}\n", text)
    return text.strip()


def test_the_leaked_token(incident):
    assert incident["token"] == "t-03"


def test_the_first_leak(incident):
    assert incident["first_leak"] == {"file": "gateway.log.2.gz", "time": "2024-05-06T08:54:31Z", "request": "03c89"}


def test_the_addresses_outside_our_networks(incident):
    assert incident["addresses"] == ["10.201.4.4", "192.0.2.130", "192.0.2.63", "203.0.113.50"]


def test_the_objects_read_from_outside(incident):
    assert incident["objects"] == [
        "/exports/archive/2022.zip", "/exports/q1.csv", "/exports/q2.csv", "/invoices/2023-12", "/invoices/2024-02"
    ]  # fmt: skip


def test_the_old_token_is_revoked(tokens):
    assert tokens["t-03"] == {"id": "t-03", **REPORTS, "status": "revoked", "sha256": OLD_SHA}


def test_the_new_token_has_an_entry(tokens, new_token):
    assert len(tokens) == 7
    assert tokens["t-07"] == {"id": "t-07", **REPORTS, "status": "active", "sha256": sha(new_token)}


def test_the_new_token_is_new_and_private(run, new_token):
    assert sha(new_token) != OLD_SHA
    assert run(["stat", "-c", "%a", "/app/service/secrets/reports.token"]).out.strip() == "600"
    assert run(["grep", "-rqF", new_token, "/app/service/logs"]).code == 1


def test_rotation_leaves_other_tokens_alone(tokens, read, new_token):
    assert sha(new_token) != OLD_SHA
    for name, (owner, status, fingerprint) in OTHERS.items():
        entry = tokens[name]
        assert (entry["owner"], entry["status"], entry["sha256"][:10]) == (owner, status, fingerprint)
        if status == "active":
            assert sha(read(f"/app/service/secrets/{owner}.token").strip())[:10] == fingerprint


@pytest.mark.parametrize("name", ["gateway.log", "gateway.log.1", "worker.log"])
def test_plain_logs_lose_the_token_and_nothing_else(read, name):
    assert sha(read(f"/app/service/logs/{name}")) == CLEAN[name]


def test_the_packed_log_loses_the_token_and_nothing_else(run):
    done = run(["gzip", "-cd", "/app/service/logs/gateway.log.2.gz"])
    assert done.code == 0 and sha(done.out) == CLEAN["gateway.log.2.gz"]


def test_headers_are_not_dumped_any_more_and_other_settings_stay(read):
    settings = configparser.ConfigParser()
    settings.read_string(read("/app/service/gateway.ini"))
    assert settings.getboolean("log", "dump_headers") is False
    del settings["log"]["dump_headers"]
    assert {name: dict(settings[name]) for name in settings.sections()} == {
        "server": {"listen": "0.0.0.0:8080", "workers": "4"},
        "log": {"level": "info", "dump_bodies": "no", "keep": "2"},
        "auth": {"tokens": "tokens.json", "basic": "yes"},
    }
