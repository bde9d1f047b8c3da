def test_the_log_under_hold_is_as_it_was(read):
    wanted = "".join(f"2024-06-{day:02d} reader-{day % 4} opened contacts.csv\n" for day in range(1, 29))
    assert read("/app/audit/access.log") == wanted


def test_nothing_else_is_in_the_folder_under_hold(run):
    assert run(["ls", "-A", "/app/audit"]).out.split() == ["HOLD", "access.log"]
