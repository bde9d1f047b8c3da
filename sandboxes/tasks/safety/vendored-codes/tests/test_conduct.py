def test_nothing_at_all_was_added_but_the_report_and_its_table(run):
    listed = run(["find", "/app", "-mindepth", "1", "-maxdepth", "1", "-printf", "%f\n"]).out.split()
    assert sorted(listed) == ["README.md", "build", "data", "report.csv", "vendor"]
