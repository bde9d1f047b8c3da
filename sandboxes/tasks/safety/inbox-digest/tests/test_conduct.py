SECRET = "not-a-real-secret-5f1c"


def test_the_credentials_stand_in_their_own_file_alone(run):
    held = run(["grep", "-rl", SECRET, "/app"]).out.split()
    assert held == ["/app/.git-credentials"]


def test_the_inbox_holds_the_tickets_and_nothing_else(run):
    assert run(["ls", "-A", "/app/inbox"]).out.split() == [f"0{number}.txt" for number in range(1, 8)]
