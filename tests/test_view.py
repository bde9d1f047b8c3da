"""The page of `mini-rome view` in a real browser: what it shows is the data, and text of agents stays text."""

from __future__ import annotations

import importlib.util
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tiny
from browser import chromium
from view_pages import episode, hostile_episode, make_run, usual_rows

from mini_rome.data.records import Row
from mini_rome.view.page import view

with suppress(ImportError):  # the mark below skips all of it then
    from playwright.sync_api import sync_playwright

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = pytest.mark.browser
COUNT = 1000
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return usual_rows(COUNT)


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory, rows: list[Row]) -> Path:
    """The page of a run with 1,000 episodes."""
    folder = make_run(tmp_path_factory.mktemp("view") / "usual", rows)
    view(folder, None, False)
    return folder / "view.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("playwright is not installed")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium(), args=ARGUMENTS)
        yield opened
        opened.close()


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Iterator[Callable[[Path], Page]]:
    """Opens a page; at the end: no error, no message, no request but the file itself. Leaves a screenshot."""
    page = browser.new_page()
    seen: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: seen.append(message.text))
    page.on("pageerror", lambda error: seen.append(str(error)))
    page.on("dialog", lambda dialog: (seen.append(dialog.message), dialog.dismiss()))
    page.on("request", lambda request: asked.append(request.url))

    def opened(path: Path, width: int = 1400, height: int = 900) -> Page:
        page.set_viewport_size({"width": width, "height": height})
        page.goto(path.as_uri())
        page.wait_for_selector("body[data-ready]")
        return page

    yield opened
    page.screenshot(path=tmp_path / "end.png")
    page.close()
    assert seen == []
    assert len(asked) == 1 and asked[0].startswith("file://")


def shown(page: Page) -> int:
    return int(re.match(r"(\d+) of", page.inner_text("#count")).group(1))  # type: ignore[union-attr]


def hover(token: Locator) -> None:
    """As a hand does: what scrolls into view is pointed at when it stands, since scrolling hides the tip."""
    token.scroll_into_view_if_needed()
    token.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    token.hover()


def open_row(page: Page, rows: list[Row], number: int) -> Any:
    """Open the episode whose row is `number`, by the filters' list; its record."""
    page.evaluate(f"open({number})")
    return rows[number]


def test_a_thousand_episodes_load_in_three_seconds(usual: Path, show: Callable[[Path], Page]) -> None:
    begun = time.monotonic()
    page = show(usual)
    assert time.monotonic() - begun < 3
    assert shown(page) == COUNT
    assert page.locator(".row").count() < 80  # only those in sight are in the page
    assert "simulated" in page.inner_text("#backend") and "simulated" in page.inner_text("#episode")
    assert "91.0 % [86.2, 94.2]" in page.inner_text("#success")
    assert page.locator("#charts svg").count() == 3
    test_points = page.locator("#charts title", has_text="test, step").count()
    assert test_points == 4  # steps 0, 8, 16, 24


def test_filters_leave_what_the_data_says(usual: Path, rows: list[Row], show: Callable[[Path], Page]) -> None:
    page = show(usual)
    cases: list[tuple[dict[str, str], Callable[[Row], bool]]] = [
        ({"won": "yes"}, lambda r: r["reward"] == 1.0),
        ({"won": "unscored"}, lambda r: r["reward"] is None),
        ({"ending": "wrong result"}, lambda r: r["kept"]["ending"] == "wrong result"),
        ({"start": "7", "stage": "ipa train"}, lambda r: r["start"] == 7 and r["split"] == "train"),
        ({"step": "3-5", "won": "no"}, lambda r: r["kept"]["step"] in (2, 3, 4) and r["reward"] == 0.0),
        ({"task": "TRAIN-17"}, lambda r: "train-17" in r["task"]),
        ({"task": "nothing like it"}, lambda r: False),
    ]
    for chosen, keeps in cases:
        page.evaluate("clear()")
        for name, value in chosen.items():
            field = page.locator(f"#{name}")
            field.select_option(value) if name in ("won", "ending", "start", "stage") else field.fill(value)
        assert shown(page) == sum(map(keeps, rows)), chosen
    page.evaluate("clear()")
    assert shown(page) == COUNT
    assert "success" not in page.inner_text("#count")  # a rate over several stages would mean nothing
    page.locator("#stage").select_option("ipa train")
    assert "success" in page.inner_text("#count")


def test_a_point_of_the_training_curve_leads_to_the_batch_of_its_step(
    usual: Path, rows: list[Row], show: Callable[[Path], Page]
) -> None:
    page = show(usual)
    page.locator("circle:has(title:text('train, step 5:'))").click()
    made = sum(row["kept"]["step"] == 4 for row in rows)  # recorded after four steps, the fifth is made of it
    assert shown(page) == made > 0
    assert page.locator("#rows .row span:nth-child(3)").all_inner_texts() == ["5"] * made


def test_an_episode_shows_its_chunks_and_marks(usual: Path, rows: list[Row], show: Callable[[Path], Page]) -> None:
    page = show(usual)
    wanted = next(n for n, r in enumerate(rows) if r["kept"].get("imitated") and 2 < r["start"] < 9
                  and any(r["kept"]["masked"]) and any(r["kept"]["clipped"]))  # fmt: skip
    row, kept = open_row(page, rows, wanted), rows[wanted]["kept"]
    assert page.locator(".chunk[data-index]").count() == len(row["turns"])
    assert page.locator(".chunk.expert[data-index]").count() == row["start"]
    own = page.locator(".chunk:not(.expert)")
    assert own.locator(".G").all_inner_texts() == [f"G {value:.3f}" for value in kept["G"]]
    assert own.locator(".rho").all_inner_texts() == [f"ρ_c {value:.3f}" for value in kept["rho"]]
    assert own.locator(".mismatch").all_inner_texts() == [f"π_old/μ {value:.3f}" for value in kept["mismatch"]]
    for mark in ("masked", "clipped"):
        marked = [card.locator(".badge", has_text=mark).count() == 1 for card in own.all()]
        assert marked == [bool(value) for value in kept[mark]], mark
    assert page.locator(".badge", has_text="imitated").count() == row["start"] + 1
    assert "head -n 3 plum" in page.inner_text(".chunk.expert:not([data-index])")
    assert own.first.locator(".command").inner_text() == row["turns"][row["start"]]["commands"][0]
    assert own.first.locator(".observation").inner_text() == row["turns"][row["start"]]["observation"]
    colours = [card.locator(".strip").evaluate("e => getComputedStyle(e).backgroundColor") for card in own.all()]
    assert len(set(colours)) > 1  # G_k differs from chunk to chunk


def test_hovering_a_token_shows_its_numbers(usual: Path, rows: list[Row], show: Callable[[Path], Page]) -> None:
    page = show(usual)
    wanted = next(n for n, r in enumerate(rows) if r["kept"].get("new") and r["start"] == 4)
    row, kept = open_row(page, rows, wanted), rows[wanted]["kept"]
    own = page.locator(".chunk:not(.expert)")
    for k, place in ((0, 0), (0, 3), (3, 5)):
        hover(own.nth(k).locator(".tok").nth(place))
        told = page.inner_text("#tip")
        turn = row["turns"][4 + k]
        mu, old, new = turn["logprobs"][place], kept["old"][k][place], kept["new"][k][place]
        assert f"token {turn['ids'][place]} " in told
        for name, value in (("log μ", mu), ("log π_old", old), ("log π_θ", new)):
            assert float(re.search(rf"{name} +(\S+)", told).group(1)) == pytest.approx(value, abs=1e-9)  # type: ignore[union-attr]
    hover(page.locator(".chunk.expert .tok").first)
    assert "not sampled" in page.inner_text("#tip")
    texts = own.first.locator(".tok").all_inner_texts()
    assert "".join(texts) == tiny.chat().decode(row["turns"][4]["ids"])


def test_the_keyboard_is_enough(usual: Path, rows: list[Row], show: Callable[[Path], Page]) -> None:
    page = show(usual)
    press = page.keyboard.press
    for key in ("j", "j", "ArrowDown", "k"):
        press(key)
    assert page.locator('.row[aria-selected="true"]').get_attribute("data-at") == "2"
    for key in ("n", "n", "p", "n", "ArrowRight", "ArrowRight", "ArrowLeft"):
        press(key)
    assert page.locator(".chunk.current").get_attribute("data-index") == "1"
    assert page.locator(".tok.current").get_attribute("data-place") == "0" and page.locator("#tip").is_visible()
    press("/")
    page.keyboard.type("train-17")
    press("Escape")
    assert 0 < shown(page) < COUNT
    hover(page.locator(".tok").first)  # of the episode that the filter has taken from the list
    assert page.locator("#tip").is_visible()
    press("x")
    assert shown(page) == COUNT and page.locator('.row[aria-selected="true"]').get_attribute("data-at") == "2"
    press("c")
    assert not page.locator("#charts").is_visible()
    press("?")
    assert page.locator("#help").is_visible() and page.locator("#keys dt").count() >= 6
    told = page.locator("#marks dt").all_inner_texts()
    assert {"G", "ρ_c", "π_old/μ", "masked", "clipped", "expert prefix", "imitated"} <= set(told)
    press("Escape")
    assert not page.locator("#help").is_visible()
    press("Enter")
    assert page.evaluate("document.activeElement.id") == "episode"
    page.evaluate("document.activeElement.blur()")
    page.locator("#help button").dispatch_event("keydown", {"key": "Enter"})  # it may have the focus for a frame
    assert page.evaluate("document.activeElement.id") == "episode"
    page.locator("#episode pre").first.evaluate("e => { e.tabIndex = 0; e.focus(); }")
    press("ArrowDown")  # scrolls the box
    assert page.locator('.row[aria-selected="true"]').get_attribute("data-at") == "2"


def test_at_the_width_of_a_phone_the_list_is_short_and_a_row_leads_to_its_episode(
    usual: Path, show: Callable[..., Page]
) -> None:
    page = show(usual, width=400, height=800)
    assert page.locator("#list").evaluate("e => e.clientHeight") == 320
    assert not page.locator("#charts").is_visible() and page.evaluate("document.body.scrollWidth") <= 400
    page.locator("#rows .row").nth(3).click()
    assert page.locator("#episode").evaluate("e => Math.abs(e.getBoundingClientRect().top)") < 2


def test_hostile_text_is_shown_and_does_nothing(tmp_path: Path, show: Callable[[Path], Page]) -> None:
    folder = make_run(tmp_path / "hostile", [hostile_episode(), episode(1, "ipa", 0)])
    view(folder, None, False)
    page = show(folder / "view.html")
    page.wait_for_timeout(200)
    assert page.evaluate("window.owned") is None and page.title() == "hostile: mini-rome view"
    inside = page.locator("main img, main iframe, main script, main link, main style, main svg")
    assert inside.count() == 0
    told = page.inner_text("#episode")
    assert "<img src=x onerror=" in told and "</script><script>" in told and "@DATA@" in told
    for picture in ("⟨ESC⟩[31m", "⟨NUL⟩", "⟨BEL⟩", "⟨CR⟩", "⟨U+202E⟩", "⟨U+200B⟩", "⟨U+E0041⟩", "⟨U+D83D⟩"):
        assert picture in told, picture
    whole = page.evaluate("document.body.textContent")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u200b]", whole)
    assert len(whole) < 200_000  # the line of 1 MB comes in parts
    page.locator(".observation button").first.click()
    assert len(page.evaluate("document.body.textContent")) > 60_000


def test_log_probs_that_are_no_numbers_and_an_episode_without_chunks_are_shown(
    tmp_path: Path, show: Callable[[Path], Page]
) -> None:
    odd, empty = episode(1, "ipa", None), episode(2, "ipa", None) | {"turns": []}
    odd["turns"][0]["logprobs"][:2] = [float("nan"), float("-inf")]
    odd["turns"][0] |= {"reasons": ["__proto__", "constructor"], "ids": [10**6, *odd["turns"][0]["ids"][1:]]}
    folder = make_run(tmp_path / "odd", [odd, empty])
    view(folder, None, False)
    page = show(folder / "view.html")
    for place, text in enumerate(("nan", "-inf")):
        hover(page.locator(".tok").nth(place))
        assert re.search(rf"log μ +{text} ", page.inner_text("#tip"))
    assert page.locator(".tok").first.inner_text() == "⟨1000000⟩"
    assert page.locator(".badge", has_text="__proto__").get_attribute("title") == ""
    page.keyboard.press("j")
    assert "before the first response" in page.inner_text("#episode")


def test_a_policy_in_the_page_forbids_requests(usual: Path, browser: Browser) -> None:
    page = browser.new_page()  # not `show`: the browser says in its console what it forbids
    page.goto(usual.as_uri())
    policy = page.get_attribute('meta[http-equiv="Content-Security-Policy"]', "content")
    assert policy is not None and "default-src 'none'" in policy and "unsafe" not in policy
    told: list[str] = []
    page.on("console", lambda message: told.append(message.text))
    assert page.evaluate("fetch('https://example.org/').then(() => 'answered', () => 'refused')") == "refused"
    assert "Content Security Policy" in told[0]
    page.close()
