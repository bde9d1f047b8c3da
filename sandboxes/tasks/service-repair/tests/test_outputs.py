"""ctl on copies of the service, a rule of the runbook at a time. A script runs as the agent and says what it saw."""

import hashlib
import json

import pytest

SERVICE = "/app/service"
PRELUDE = """
cp -r /app/service "${copy:=svc}" && cd "$copy" || exit 9
get() { curl -s -m 2 "http://127.0.0.1:${port:-8085}$1"; }
set_conf() { printf '%s\\n' "${@:2}" > "etc/conf.d/$1"; }
alive() { [ -d "/proc/$1" ] && [ -n "$(tr -d '\\0' < "/proc/$1/cmdline")" ] && echo alive || echo gone; }
"""
DIGEST = "9760c248a19f17f11d890edf77823d23fd699c3ef9e55e1c8ff007b9aa0c3250"
SITE = {"port": 8085, "workers": 6, "timeout": 30, "greeting": "good morning, harbour"}


@pytest.fixture
def told(run, scratch):
    """The lines that a script prints in a fresh copy of the service, and its stderr."""

    def script(text, before=""):
        done = run(["bash", "-c", before + PRELUDE + text], cwd=scratch, timeout=15)
        return done.out.splitlines(), done.err

    return script


def test_vendor_code_is_unchanged(read):
    digest = hashlib.sha256(read("/app/service/server.py").encode()).hexdigest()
    assert digest == DIGEST


def test_the_newest_intact_snapshot_was_put_back(read):
    stored = json.loads(read("/app/service/data/store.json"))
    assert stored["values"] == {"gate": "open", "tide": "low", "pilot": "Amara", "crane": "2"}


def test_start_returns_when_the_service_is_healthy(told):
    lines, _ = told("""./ctl start >/dev/null; echo $?; get /health; echo
    get /v/crane; echo; alive $(cat run/server.pid)""")
    assert lines == ["0", "ok", "2", "alive"]


def test_the_configuration_of_this_host(told):
    lines, _ = told("""./ctl start >/dev/null; get /config; echo
    tr -cd '#\\r' < run/effective.conf | wc -c; grep -cv ' = ' run/effective.conf""")
    assert json.loads(lines[0]) == SITE
    assert lines[1:] == ["0", "0"]


def test_settings_files_are_read_in_the_order_of_their_numbers(told):
    lines, _ = told("""
    set_conf 100-last.conf 'workers = 12'; set_conf 2-first.conf 'timeout = 5' 'workers = 3' 'greeting = no'
    set_conf 30-mid.conf 'workers = 11' '' '  ' '# timeout = 7'; printf 'timeout = 6' > etc/conf.d/5-cut.conf
    set_conf off-31.conf 'workers = 99'; set_conf 200-x.conf.off 'workers = 98'
    ./ctl start >/dev/null; get /config""")
    assert json.loads(lines[0]) == {**SITE, "workers": 12, "timeout": 6}


def test_status_of_a_running_and_a_stopped_service(told):
    lines, _ = told("""./ctl status; echo $?; ./ctl start >/dev/null; pid=$(cat run/server.pid)
    [ "$(./ctl status)" = "running $pid" ]; echo $?; ./ctl status >/dev/null; echo $?
    ./ctl stop >/dev/null; ./ctl status; echo $?""")
    assert lines == ["stopped", "3", "0", "0", "stopped", "3"]


def test_a_second_start_starts_nothing(told):
    lines, _ = told("""./ctl start >/dev/null; pid=$(cat run/server.pid); ./ctl start; echo $?
    [ $pid = $(cat run/server.pid) ] && pgrep -fc 'server[.]py'""")
    assert lines == ["already running", "0", "1"]


def test_a_pid_that_belongs_to_another_process_does_not_count(told):
    lines, _ = told("""sleep 60 & other=$!; echo $other > run/server.pid
    ./ctl status; ./ctl stop >/dev/null; echo $?; alive $other; echo $other > run/server.pid
    ./ctl start >/dev/null; echo $?; get /health; echo; alive $other""")
    assert lines == ["stopped", "0", "alive", "0", "ok", "alive"]


def test_stop_lets_the_service_write_its_data(told):
    lines, _ = told("""./ctl start >/dev/null; curl -s -o put -X PUT -d night http://127.0.0.1:8085/v/shift
    pid=$(cat run/server.pid); ./ctl stop >/dev/null; echo $?; alive $pid; ls run | grep -c pid
    ./ctl start >/dev/null; get /v/shift; echo; ./ctl stop >/dev/null; ./ctl stop >/dev/null; echo $?""")
    assert lines == ["0", "gone", "0", "night", "0"]


def test_stop_kills_a_service_that_does_not_end(told):
    lines, _ = told("""./ctl start >/dev/null; pid=$(cat run/server.pid); kill -STOP $pid
    begin=${EPOCHREALTIME%.*}; ./ctl stop >/dev/null 2>&1; echo $?; alive $pid; ls run | grep -c pid
    took=$((${EPOCHREALTIME%.*} - begin)); [ $took -ge 1 ] && [ $took -le 6 ] && echo in time""")
    assert lines == ["0", "gone", "0", "in time"]


def test_a_start_that_fails_says_why_and_leaves_nothing(told):
    lines, err = told("""set_conf 11-bad.conf 'workers = many'; ./ctl start >/dev/null; echo $?
    ls run | grep -c pid; pgrep -fc 'server[.]py'; tail -n 1 log/server.log""")
    assert lines[:3] == ["1", "0", "0"]
    assert "workers must be a number, not 'many'" in lines[3] and lines[3] in err.splitlines()


def test_the_health_of_another_service_on_the_port_does_not_count(told):
    lines, err = told("""./ctl start >/dev/null; first=$(cat run/server.pid)
    cp -r . ../second; cd ../second; rm -rf run log; ./ctl start >/dev/null; echo $?
    ls run | grep -c pid; alive $first; pgrep -fc 'server[.]py'""")
    assert lines == ["1", "0", "alive", "1"]
    assert "port 8085: Address already in use" in err


def test_reload_uses_the_present_configuration(told):
    lines, _ = told("""./ctl reload 2>/dev/null; echo $?; ./ctl start >/dev/null; pid=$(cat run/server.pid)
    set_conf 11-new.conf 'greeting = ahoy'; ./ctl reload; echo $?; sleep 0.2; get /config; echo
    [ $pid = $(cat run/server.pid) ] && alive $pid""")
    assert (lines[0], lines[1], lines[3]) == ("1", "0", "alive")
    assert json.loads(lines[2]) == {**SITE, "greeting": "ahoy"}


def test_reload_refuses_what_is_not_valid(told):
    lines, _ = told("""./ctl start >/dev/null; pid=$(cat run/server.pid); set_conf 11-bad.conf 'colour = blue'
    ./ctl reload 2>/dev/null; echo $?; sleep 0.2; alive $pid; kill -HUP $pid; sleep 0.2; alive $pid; get /config""")
    assert lines[:3] == ["1", "alive", "alive"]
    assert json.loads(lines[3]) == SITE


def test_two_copies_side_by_side_one_in_a_path_with_spaces(told):
    lines, _ = told("""./ctl start >/dev/null; cp -r . '../north pier'; cd '../north pier'; rm -rf run log
    set_conf 11-port.conf 'port = 8086' 'greeting = north'; (cd / && "$OLDPWD/ctl" start >/dev/null); echo $?
    get /config; echo; port=8086; get /config; echo; ls run log | grep -c server
    ./ctl stop >/dev/null; port=8085; get /health""",
                    before="mkdir 'a b'; copy='a b/svc'\n")  # fmt: skip
    assert (lines[0], lines[3], lines[4]) == ("0", "2", "ok")
    assert json.loads(lines[1]) == SITE
    assert json.loads(lines[2]) == {**SITE, "port": 8086, "greeting": "north"}
