"""referee.py on games of every ending, and the verdicts of the three given games."""

PROGRAM = "/app/referee.py"
EMPTY = ["......."] * 6
DRAWN = "257771314744647214154617633623313656555222"
WON_BY_THE_LAST_PIECE = "535475414423417646117365652637672711323225"


def referee(run, moves):
    """(verdict, board, exit code)"""
    done = run(["python3", PROGRAM], stdin=moves)
    lines = done.out.splitlines()
    assert len(lines) == 7, done
    return lines[0], lines[1:], done.code


def spaced(moves):
    return " ".join(moves) + "\n"


def test_the_given_games(read):
    assert read("/app/verdicts/corner.txt").splitlines() == ["X wins at move 7", *EMPTY[:4], "...OOO.", "...XXXX"]
    ladder = ["X wins at move 11", *EMPTY[:2], "...X...", "..XX...", ".XXO...", "XOOO.O."]
    assert read("/app/verdicts/ladder.txt").splitlines() == ladder
    hasty = ["illegal move 8: game is over", *EMPTY[:2], "X......", "XO.....", "XO.....", "XO....."]
    assert read("/app/verdicts/hasty.txt").splitlines() == hasty


def test_no_moves_at_all(run):
    assert referee(run, "") == ("open, X to move", EMPTY, 0)


def test_an_open_game_with_any_white_space(run):
    assert referee(run, "\n1\t7\n\n  7 ") == ("open, O to move", [*EMPTY[:4], "......X", "X.....O"], 0)


def test_a_column_of_four(run):
    verdict, board, code = referee(run, "7 2 6 2 7 2 6 2")
    assert (verdict, code) == ("O wins at move 8", 0)
    assert board == [*EMPTY[:2], ".O.....", ".O.....", ".O...XX", ".O...XX"]


def test_a_row_completed_in_its_middle(run):
    assert referee(run, "4 4 5 5 7 7 6")[0] == "X wins at move 7"


def test_more_than_four_in_a_row_win_too(run):
    assert referee(run, "1 1 2 2 3 3 5 5 6 6 7 7 4")[0] == "X wins at move 13"


def test_three_in_a_row_and_a_row_around_the_edge_do_not_win(run):
    assert referee(run, "1 1 2 2 7 7 6 6")[0] == "open, X to move"
    assert referee(run, "5 5 6 6 7 7")[0] == "open, X to move"


def test_a_rising_diagonal(run):
    assert referee(run, "1 2 2 3 3 4 3 4 4 6 4")[0] == "X wins at move 11"


def test_a_falling_diagonal(run):
    verdict, board, code = referee(run, "7 6 6 5 5 4 5 4 4 1 4")
    assert (verdict, code) == ("X wins at move 11", 0)
    assert board == [*EMPTY[:2], "...X...", "...XX..", "...OXX.", "O..OOOX"]


def test_a_drawn_game(run):
    verdict, board, code = referee(run, spaced(DRAWN))
    assert (verdict, code) == ("draw", 0)
    assert "." not in "".join(board)


def test_the_last_piece_can_win(run):
    assert referee(run, spaced(WON_BY_THE_LAST_PIECE))[0] == "O wins at move 42"


def test_columns_that_do_not_exist(run):
    for token in ("0", "8", "x", "-1", "12", "1.0", "\u0662"):
        assert referee(run, f"4 {token} 4") == (
            "illegal move 2: no such column", [*EMPTY[:5], "...X..."], 2
        ), token  # fmt: skip


def test_a_full_column(run):
    verdict, board, code = referee(run, "3 3 3 3 3 3 3 1")
    assert (verdict, code) == ("illegal move 7: column is full", 2)
    assert [row[2] for row in board] == ["O", "X"] * 3


def test_a_move_after_a_win(run):
    verdict, board, code = referee(run, "1 2 1 2 1 2 1 9")
    assert (verdict, code) == ("illegal move 8: game is over", 2)
    assert board[5] == "XO....."


def test_a_move_after_a_draw(run):
    assert referee(run, spaced(DRAWN + "1"))[0::2] == ("illegal move 43: game is over", 2)
