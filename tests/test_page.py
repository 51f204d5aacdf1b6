"""The page holds what the runs recorded, puts only equal settings together, and works in a browser."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsieve.errors import InvalidSetting
from fedsieve.report.page import MOST_DETAIL, write_page
from fedsieve.runs import Config, History, assemble

ALGORITHMS = ("fedavg", "fedprox", "fedpdp", "fedca", "fedprox-ca", "fedcm-ucb", "fedcm-ts")


def history(
    algorithm: str = "fedavg", seed: int = 0, rounds: int = 6, played: int | None = None, **fields: Any
) -> History:
    """A made-up run, finished unless fewer rounds than it has are `played`."""
    config = Config(algorithm=algorithm, seed=seed, rounds=rounds, **fields)
    draws = np.random.default_rng([seed, ALGORITHMS.index(algorithm)])
    rows: list[dict[str, Any]] = []
    for number in range(1, (rounds if played is None else played) + 1):
        sampled = sorted(draws.choice(config.clients, max(1, config.clients * 2 // 5), replace=False).tolist())
        reached = 0.8 * (1 - math.exp(-number / 20)) + 0.1 * float(draws.random())
        rows.append(
            {
                "round": number,
                "sampled": sampled,
                "kept": sampled[: max(1, len(sampled) // 2)],
                "score": None,
                "search": None,
                "test_accuracy": reached,
                "test_loss": 2.3 - reached,
                "train_loss": 2.0 - reached,
            }
        )
    reached_in_all = [row["test_accuracy"] for row in rows]
    summary = {
        "final_accuracy": reached_in_all[-1],
        "best_accuracy": max(reached_in_all),
        "mean_last_10": float(np.mean(reached_in_all[-10:])),
        "versions": {"fedsieve": "1.2.3"},
        "hardware": {"device": "cpu"},
        "command": "fedsieve run",
    } if played is None else {}  # fmt: skip
    return History(config, rows, summary)


def with_everything(run: History) -> History:
    """The same run with every field that a row may have."""
    clients = list(range(run.config.clients))
    for row in run.rows:
        share = row["round"] / len(run.rows)
        row["score"] = share
        row["search"] = {"looked_at": 3, "optimal": True, "bound": 1.0, "all": share / 2, "single": share / 4}
        row["bandit"] = {
            "clients": clients,
            "mean": [client / len(clients) for client in clients],
            "low": [0.0 for _ in clients],
            "high": [math.inf if client == 0 else 1.0 for client in clients],
        }
        row["per_class"] = {str(client): [share] * 10 for client in row["sampled"]}
        row["phases"] = dict.fromkeys(("sample", "train", "score", "search", "average", "evaluate", "write"), 0.01)
    return run


def with_devices(run: History) -> History:
    """The same run on devices, a fifth of them hostile with a backdoor."""
    speed = 1 + float(np.random.default_rng(run.config.seed).random())
    for row in run.rows:
        row["simulated"] = {"seconds": 60 * speed, "bytes": 1_000_000 * len(row["sampled"])}
        row["backdoor_success"] = 1 / row["round"]
    if run.summary:
        run.summary.update(hostile=list(range(0, run.config.clients, 5)), requests_gini=0.25)
    return run


def content(page: Path) -> Any:
    """What the page hands to its script."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(encoding="utf-8"))
    assert found
    return json.loads(found[1])


def page_of(tmp_path: Path, *histories: History) -> Any:
    return content(write_page(histories, tmp_path / "page.html"))


def test_no_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="runs: "):
        write_page([], tmp_path / "page.html")


def test_the_page_is_one_file_that_asks_for_nothing_else(tmp_path: Path) -> None:
    path = write_page([history()], tmp_path / "new" / "page.html")
    text = path.read_text(encoding="utf-8")
    assert "<title>FedSieve: runs on digits</title>" in text
    assert "default-src 'none'" in text
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\ssrc=|@import|url\((?!#)", text)


def test_curves_are_those_of_the_runs(tmp_path: Path) -> None:
    run = history()
    (setting,) = page_of(tmp_path, run)["settings"]
    np.testing.assert_allclose(setting["runs"]["fedavg"][0]["accuracy"], run.accuracy, rtol=1e-4)
    line = setting["lines"][0]
    assert (line["algorithm"], line["seeds"], line["reached"]) == ("fedavg", 1, 1)
    assert line["final"] == [pytest.approx(run.accuracy[-1], rel=1e-4), 0]


def test_titles_and_names_cannot_break_out(tmp_path: Path) -> None:
    evil = "</script ></script><!--<script>window.broken=1</script><b>&$data"
    run = history()
    run.summary["own_parts"] = {"sampler": evil}
    run.summary["command"] = evil
    path = write_page([run], tmp_path / "page.html", title=evil)
    text = path.read_text(encoding="utf-8")
    assert "<script>window.broken" not in text
    assert text.count("</script>") == 2
    assert "<" not in text.partition('id="data">')[2].partition("</script>\n")[0]
    assert "&lt;b&gt;&amp;$data" in text
    assert content(path)["settings"][0]["commands"] == [evil]


def test_only_algorithms_and_seeds_share_a_setting(tmp_path: Path) -> None:
    report = page_of(
        tmp_path,
        history(alpha=0.1),
        history(seed=1, alpha=0.1, device="cpu", engine="sequential"),
        history("fedca", alpha=0.1),
        history(alpha=1.0, clients=10),
    )
    assert report["differing"] == ["alpha", "clients"]
    assert [setting["name"] for setting in report["settings"]] == ["alpha 0.1, clients 20", "alpha 1, clients 10"]
    seeds = [{name: len(runs) for name, runs in setting["runs"].items()} for setting in report["settings"]]
    assert seeds == [{"fedavg": 2, "fedca": 1}, {"fedavg": 1}]


def test_own_parts_are_told_apart(tmp_path: Path) -> None:
    own_filter, own_model = history(seed=0), history(seed=2)
    own_filter.summary["own_parts"] = {"filter": "Mine"}
    own_model.summary["own_parts"] = {"model": "Net"}
    report = page_of(tmp_path, history(seed=1), own_filter, own_model)
    assert [list(setting["runs"]) for setting in report["settings"]] == [["fedavg", "fedavg with Mine"], ["fedavg"]]
    assert [setting["name"] for setting in report["settings"]] == ["model mlp", "model Net"]
    report = page_of(tmp_path, history("fedpdp"), history("fedpdp", sampler="oort", filter="krum"))
    assert {name: shown["title"] for name, shown in report["algorithms"].items()} == {
        "fedpdp": "FedPdp",
        "fedpdp with oort, krum": "FedPdp with oort, krum",
    }
    assert [list(setting["runs"]) for setting in report["settings"]] == [["fedpdp", "fedpdp with oort, krum"]]


def test_the_same_run_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="fedavg, seed 0, twice"):
        write_page([history(), history()], tmp_path / "page.html")


def test_unfinished_runs_are_in_the_curves_and_not_in_the_table(tmp_path: Path) -> None:
    (setting,) = page_of(tmp_path, history(), history(seed=1, played=2), history("fedca", played=0))["settings"]
    assert [(line["algorithm"], line["seeds"]) for line in setting["lines"]] == [("fedavg", 1)]
    assert setting["unfinished"] == ["FedAvg, seed 1 (2 of 6 rounds)", "FedCA, seed 0 (0 of 6 rounds)"]
    assert len(setting["runs"]["fedavg"][1]["accuracy"]) == 2
    assert setting["runs"]["fedca"] == [{"seed": 0}]


def test_what_was_not_recorded_is_left_out(tmp_path: Path) -> None:
    (setting,) = page_of(tmp_path, history())["settings"]
    assert set(setting["runs"]["fedavg"][0]) == {"seed", "accuracy", "testLoss", "trainLoss", "participation"}


def test_what_was_recorded_is_there(tmp_path: Path) -> None:
    run = with_everything(history(rounds=2))
    record = page_of(tmp_path, run)["settings"][0]["runs"]["fedavg"][0]
    assert (record["score"], record["scoreOfAll"], record["scoreOfSingle"]) == ([0.5, 1], [0.25, 0.5], [0.125, 0.25])
    assert record["phases"] == [10.0] * 7
    assert record["bandit"]["mean"][1][:3] == [0, 0.05, 0.1]
    assert record["bandit"]["high"][0][:2] == [None, 1]
    assert record["perClass"]["clients"][0] == {str(client): [0.5] * 10 for client in run.rows[0]["sampled"]}
    for round, row in enumerate(run.rows):
        states = record["participation"][20 * round : 20 * (round + 1)]
        assert [client for client in range(20) if states[client] == "2"] == row["kept"]
        assert [client for client in range(20) if states[client] != "0"] == row["sampled"]


def test_devices_and_hostile_clients_are_there(tmp_path: Path) -> None:
    run = with_devices(history(rounds=2))
    sampled = [[0, 1, 5, 6], [2, 5, 7, 10]]
    for row, who in zip(run.rows, sampled, strict=True):
        row |= {"sampled": who, "kept": who[:3], "simulated": {"seconds": 1.5, "bytes": 4000}}
    (setting,) = page_of(tmp_path, run)["settings"]
    record, line = setting["runs"]["fedavg"][0], setting["lines"][0]
    assert (record["seconds"], record["bytes"], record["backdoor"]) == ([1.5, 3], [4000, 8000], [1, 0.5])
    states = [record["participation"][20 * round : 20 * (round + 1)] for round in (0, 1)]
    assert [{client: states[round][client] for client in sampled[round]} for round in (0, 1)] == [
        {0: "4", 1: "2", 5: "4", 6: "1"},
        {2: "2", 5: "4", 7: "2", 10: "3"},
    ]
    assert [line[name][0] for name in ("hostileAsked", "hostileKept", "gini", "backdoor")] == [0.5, 0.5, 0.25, 0.75]
    rounds = int(line["rounds"][0])
    assert (line["seconds"][0], line["bytes"][0]) == (1.5 * rounds, 4000 * rounds)


def test_a_plain_run_brings_nothing_of_devices(tmp_path: Path) -> None:
    (setting,) = page_of(tmp_path, history())["settings"]
    assert list(setting["lines"][0]) == ["algorithm", "seeds", "final", "best", "last", "rounds", "reached"]


def test_a_loss_that_is_no_number_is_a_gap(tmp_path: Path) -> None:
    run = history()
    run.rows[0]["test_loss"] = math.nan
    run.rows[1]["test_loss"] = math.inf
    assert page_of(tmp_path, run)["settings"][0]["runs"]["fedavg"][0]["testLoss"][:2] == [None, None]


def test_data_per_client_is_what_the_run_trains_on(tmp_path: Path) -> None:
    config = Config(algorithm="fedavg", seed=3, heterogeneity="client", alpha=0.5, rounds=6)
    federation, engine = assemble(config)
    engine.close()
    run = history(seed=3, heterogeneity="client", alpha=0.5)
    counts = np.array(page_of(tmp_path, run)["settings"][0]["examples"]["seeds"]["3"])
    sizes = counts.sum(1)
    assert np.flatnonzero(sizes).tolist() == federation.clients.tolist()
    np.testing.assert_allclose(sizes[sizes > 0] / sizes.sum(), federation.weights)


def test_data_that_is_not_at_hand_is_left_out_with_a_sentence(tmp_path: Path) -> None:
    (setting,) = page_of(tmp_path, history(dataset="mnist", data_dir=tmp_path / "nothing"))["settings"]
    assert setting["examples"] is None
    assert "mnist was not at hand" in setting["examplesMissing"]


def test_many_clients_are_left_out_with_a_sentence(tmp_path: Path) -> None:
    (setting,) = page_of(tmp_path, history(clients=300))["settings"]
    assert "participation" not in setting["runs"]["fedavg"][0]
    assert "300 clients" in setting["examplesMissing"]


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """110 runs of 100 rounds with everything that can be recorded."""
    grid = [(name, seed, alpha) for alpha in (0.1, 1.0) for name in ALGORITHMS for seed in range(8)][:110]
    runs = [with_everything(history(name, seed, 100, alpha=alpha)) for name, seed, alpha in grid]
    return write_page(runs, tmp_path_factory.mktemp("many") / "page.html")


def test_many_runs_make_a_small_page(many: Path) -> None:
    assert many.stat().st_size < 4_000_000
    report = content(many)
    records = [run for setting in report["settings"] for runs in setting["runs"].values() for run in runs]
    assert len(records) == 110
    assert sum("bandit" in run for run in records) == 14
    assert "first run of each algorithm" in report["detailNote"]
    numbers = sum(len(run["bandit"]["rounds"]) * (3 * 20 + 8 * 10) for run in records if "bandit" in run)
    assert numbers <= MOST_DETAIL


class Browser:
    """A headless Chromium that looks at one page after another."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, path: Path, width: int = 1280) -> None:
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.get(path.as_uri())
        self.wait_for("document.readyState === 'complete'")  # on a busy machine, `get` comes back before that
        assert self.js("return document.documentElement.dataset.ready") is not None, self.problems()

    def wait_for(self, condition: str) -> None:
        until = time.monotonic() + 30
        while not self.js(f"return {condition}"):
            assert time.monotonic() < until, f"not within 30 s: {condition}"
            time.sleep(0.02)

    def bring_into_view(self, selector: str) -> Any:
        """The element, once the page has come to rest with it in the middle of the window."""
        self.js(f"document.querySelector('{selector}').scrollIntoView({{block: 'center'}})")
        self.js("window.rest = 0; requestAnimationFrame(() => requestAnimationFrame(() => { window.rest = 1; }))")
        self.wait_for("window.rest === 1")
        return self.find(selector)

    def js(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def texts(self, selector: str) -> list[str]:
        return [part.text for part in self.driver.find_elements("css selector", selector)]

    def lines(self) -> list[str]:
        """The names of the lines in the accuracy chart."""
        names: list[str] = self.js(
            "return [...document.querySelectorAll('#accuracy-chart g[data-name]')].map((line) => line.dataset.name)"
        )
        return names

    def problems(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs the Python package selenium")
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    program = next(filter(None, map(shutil.which, names)), None)
    driver_program = shutil.which("chromedriver")
    if program is None or driver_program is None:
        pytest.skip("needs Chromium and its driver (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # Chromium's own sandbox refuses to run as root
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver_program))
    yield Browser(driver)
    driver.quit()


@pytest.fixture(scope="module")
def two_settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = [
        with_everything(history(name, seed, 12, alpha=0.1))
        for name in ("fedavg", "fedca", "fedcm-ts")
        for seed in (0, 1)
    ]
    return write_page([*runs, history("fedprox", rounds=12, alpha=5.0)], tmp_path_factory.mktemp("two") / "page.html")


def test_every_section_is_drawn(browser: Browser, two_settings: Path) -> None:
    browser.open(two_settings)
    assert browser.texts("h2") == [
        "Summary",
        "Accuracy and loss over rounds",
        "Rounds to a target",
        "Data per client",
        "Who was asked and kept",
        "What the bandit believed",
        "Accuracy per class and client",
        "Score of the models kept",
        "Time per stage",
        "Configuration and environment",
    ]
    assert browser.lines() == ["FedAvg", "FedCA", "FedCM-TS"]
    assert browser.texts("table.summary tbody th") == ["FedAvg", "FedCA", "FedCM-TS"]
    unlabelled = browser.js("return document.querySelectorAll('main svg[role=img]:not([aria-label])').length")
    assert unlabelled == 0
    assert browser.problems() == []


def test_an_algorithm_can_be_switched_off_and_on(browser: Browser, two_settings: Path) -> None:
    browser.open(two_settings)
    button = browser.find("button[data-algorithm=fedca]")
    button.click()
    assert (button.get_attribute("aria-pressed"), browser.lines()) == ("false", ["FedAvg", "FedCM-TS"])
    assert browser.texts("#target .name") == ["FedAvg", "FedCM-TS"]
    button.send_keys(" ")
    assert (button.get_attribute("aria-pressed"), browser.lines()) == ("true", ["FedAvg", "FedCA", "FedCM-TS"])
    assert browser.problems() == []


def test_the_other_setting_can_be_reached(browser: Browser, two_settings: Path) -> None:
    browser.open(two_settings)
    assert browser.texts("#setting option") == ["alpha 0.1", "alpha 5"]
    browser.find("#setting option:last-child").click()
    assert browser.lines() == ["FedProx"]
    assert browser.texts("table.summary tbody th") == ["FedProx"]
    assert "What the bandit believed" not in browser.texts("h2")
    assert browser.problems() == []


def test_keys_show_values_and_zoom(browser: Browser, two_settings: Path) -> None:
    browser.open(two_settings)
    chart = browser.bring_into_view("#accuracy-chart svg")
    chart.send_keys("\ue012")  # arrow left: from the end
    assert browser.find("#tip").text.startswith("round 12")
    assert len(browser.texts("#tip tr")) == 3
    everything = browser.find("#zoom button:last-child")
    assert not everything.is_enabled()
    chart.send_keys("+")
    assert everything.is_enabled()
    chart.send_keys("\ue00c")  # Escape
    assert not everything.is_enabled()
    assert browser.problems() == []


def test_dragging_zooms_and_pointing_shows_values(browser: Browser, two_settings: Path) -> None:
    from selenium.webdriver import ActionChains

    browser.open(two_settings)
    chart = browser.bring_into_view("#accuracy-chart svg")
    ActionChains(browser.driver).move_to_element_with_offset(chart, -200, 0).click_and_hold().move_by_offset(
        250, 0
    ).release().perform()
    everything = browser.find("#zoom button:last-child")
    assert everything.is_enabled()
    ActionChains(browser.driver).move_to_element_with_offset(chart, 10, 0).perform()
    assert "FedCM-TS" in browser.find("#tip").text
    ActionChains(browser.driver).double_click(chart).perform()
    assert not everything.is_enabled()
    assert browser.problems() == []


def test_the_target_can_be_moved(browser: Browser, two_settings: Path) -> None:
    browser.open(two_settings)
    slider = browser.find("#target-slider")
    slider.send_keys("\ue011")  # Home: 0 %, which every run has in its first round
    assert browser.texts("#target .value") == ["1.0 (2/2)"] * 3
    slider.send_keys("\ue010")  # End: what only the best run comes to, if any
    assert "not reached" in browser.texts("#target .value")


@pytest.fixture(scope="module")
def devices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = [
        with_devices(history(name, seed, 12, system="drawn", attack="backdoor", hostile=0.2))
        for name in ("fedavg", "fedca")
        for seed in (0, 1, 2)
    ]
    return write_page(runs, tmp_path_factory.mktemp("devices") / "page.html")


def test_plain_runs_have_no_switch(browser: Browser, two_settings: Path) -> None:
    browser.open(two_settings)
    assert browser.texts(".switch, #view-note, #backdoor-chart") == []
    assert browser.texts("#participation .legend li") == ["not asked", "asked, left out", "asked and kept"]


def test_curves_can_be_drawn_over_simulated_time_and_bytes(browser: Browser, devices: Path) -> None:
    browser.open(devices)
    assert browser.texts(".switch label") == ["Rounds", "Simulated time", "Bytes sent"]
    assert "round" in browser.texts("#accuracy-chart svg text")
    for value, axis in (("seconds", "simulated time (min)"), ("bytes", "bytes sent (MB)"), ("rounds", "round")):
        browser.find(f".switch input[value={value}]").click()
        for chart in ("#accuracy-chart", "#backdoor-chart", "#curves .panels .lines"):
            assert axis in browser.texts(f"{chart} svg text")
        assert browser.lines() == ["FedAvg", "FedCA"]
        assert browser.find("#view-note").is_displayed() == (value != "rounds")
    assert browser.problems() == []


def test_the_mean_over_time_is_of_what_each_run_had_reached(browser: Browser, tmp_path: Path) -> None:
    times, reached = ([1, 2, 5], [2, 2, 2]), ([0.1, 0.2, 0.3], [0.5, 0.6, 0.7])  # over at 1, 3, 8 and 2, 4, 6
    runs = [history(seed=seed, rounds=3) for seed in (0, 1, 2)]
    for run, seconds, accuracies in zip(runs, times, reached, strict=False):
        for row, taken, accuracy in zip(run.rows, seconds, accuracies, strict=True):
            row |= {"simulated": {"seconds": taken, "bytes": 1000}, "test_accuracy": accuracy}
    browser.open(write_page(runs, tmp_path / "page.html"))
    browser.find(".switch input[value=seconds]").click()
    assert "Left out, as they have no simulated time: 1 run of FedAvg." in browser.find("#view-note").text
    chart = browser.bring_into_view("#accuracy-chart svg")
    chart.send_keys("\ue010")  # End
    assert browser.find("#tip").text.splitlines() == ["after 6.00 s", "FedAvg 45.0 % ± 35.4 (without 1 run)"]
    chart.send_keys("\ue011")  # Home: no round is over yet
    assert browser.find("#tip").text == "after 0.00 s"
    for _ in range(100):
        chart.send_keys("\ue014")  # arrow right: to the third part
    assert browser.find("#tip").text.splitlines() == ["after 2.00 s", "FedAvg 30.0 % ± 28.3 (without 1 run)"]
    assert browser.problems() == []


def test_time_is_zoomed_and_switched_like_rounds(browser: Browser, devices: Path) -> None:
    from selenium.webdriver import ActionChains

    browser.open(devices)
    browser.find(".switch input[value=seconds]").send_keys(" ")
    chart = browser.bring_into_view("#accuracy-chart svg")
    smaller, everything = browser.find("#zoom button:nth-child(2)"), browser.find("#zoom button:last-child")
    ActionChains(browser.driver).move_to_element_with_offset(chart, -200, 0).click_and_hold().move_by_offset(
        250, 0
    ).release().perform()
    assert smaller.is_enabled() and everything.is_enabled()
    ActionChains(browser.driver).move_to_element_with_offset(chart, 10, 0).perform()
    assert re.match(r"after [\d.]+ min\nFed", browser.find("#tip").text.replace("\u00a0", " "))
    browser.find(".switch input[value=rounds]").click()
    assert not smaller.is_enabled() and everything.is_enabled()  # rounds are not zoomed, time is
    everything.click()
    assert not everything.is_enabled()
    browser.find("button[data-algorithm=fedca]").click()
    browser.find(".switch input[value=seconds]").click()
    assert browser.lines() == ["FedAvg"]
    chart.send_keys("\ue012")
    chart.send_keys("+")
    assert everything.is_enabled()
    chart.send_keys("\ue00c")  # Escape
    assert not everything.is_enabled()
    assert browser.problems() == []


def test_what_a_target_costs_is_beside_its_rounds(browser: Browser, devices: Path) -> None:
    browser.open(devices)
    headings = browser.texts("#summary thead th")
    assert [text.split(" to ")[0] for text in headings[-4:]] == ["Rounds", "Time", "Bytes", "Backdoor"]
    browser.find("#target-slider").send_keys("\ue011")  # Home: reached in the first round
    for text in browser.texts("#target .value"):
        assert re.fullmatch(r"1\.0 \(3/3\), [\d.]+ s, 8\.00 MB", text.replace("\u00a0", " "))
    assert browser.problems() == []


def test_hostile_clients_are_told_apart(browser: Browser, devices: Path) -> None:
    browser.open(devices)
    assert browser.texts("#participation .legend li")[3:] == ["hostile, left out", "hostile, kept"]
    assert browser.texts("#participation thead th") == [
        "Algorithm",
        "Gini of requests",
        "Hostile of those asked",
        "Hostile of those kept",
    ]
    assert "from hostile clients" in browser.find("#participation svg").get_attribute("aria-label")
    assert browser.problems() == []


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_nothing_is_wider_than_the_screen(
    browser: Browser, many: Path, devices: Path, tmp_path: Path, width: int
) -> None:
    own_part = history()
    own_part.summary["own_parts"] = {"filter": "ARatherLongNameForAFilter" * 3, "model": "Net" * 30}
    own_part.summary["command"] = "fedsieve" * 30
    for page in (many, devices, write_page([own_part, history(seed=1)], tmp_path / "page.html", title="Unbroken" * 20)):
        browser.open(page, width)
        browser.js("for (const part of document.querySelectorAll('details')) part.open = true")
        assert browser.js("return document.documentElement.scrollWidth") <= width


def test_printing_opens_what_is_folded(browser: Browser, two_settings: Path) -> None:
    browser.open(two_settings)
    browser.js("dispatchEvent(new Event('beforeprint'))")
    assert browser.js("return document.querySelectorAll('details:not([open])').length") == 0
    browser.js("dispatchEvent(new Event('afterprint'))")
    assert browser.js("return document.querySelectorAll('details[open]').length") == 0


def test_short_and_broken_off_runs_are_drawn(browser: Browser, tmp_path: Path) -> None:
    broken_off = [history(seed=1, played=1), history(played=0, rounds=6, seed=2)]
    browser.open(write_page([history(), *broken_off], tmp_path / "broken-off.html"))
    assert "FedAvg, seed 2 (0 of 6 rounds)" in browser.find("#summary .note:last-child").text
    browser.open(write_page([with_everything(history(rounds=1, clients=1))], tmp_path / "short.html"))
    assert browser.lines() == ["FedAvg"]
    browser.open(write_page([history(played=0)], tmp_path / "nothing.html"))
    assert browser.problems() == []


def test_short_and_broken_off_runs_are_drawn_over_time(browser: Browser, tmp_path: Path) -> None:
    whole = [with_devices(history(seed=seed)) for seed in (0, 1)]
    broken_off = [with_devices(history(seed=2, played=1)), with_devices(history("fedca", played=0))]
    browser.open(write_page([*whole, *broken_off], tmp_path / "broken-off.html"))
    browser.find(".switch input[value=seconds]").click()
    browser.bring_into_view("#accuracy-chart svg").send_keys("\ue010")  # End
    assert "(without 1 run)" in browser.find("#tip").text  # the one that broke off does not cut the others short
    browser.open(write_page([with_devices(history(rounds=1, seed=seed)) for seed in (0, 1)], tmp_path / "short.html"))
    browser.find(".switch input[value=seconds]").click()
    assert browser.texts("#accuracy-chart .nothing") == ["nothing to show"]  # one is over before the other has a value
    assert browser.problems() == []


def test_scripts_in_names_do_not_run(browser: Browser, tmp_path: Path) -> None:
    evil = "</script><img src=x onerror='window.broken=1'><script>window.broken=1</script>"
    run = history()
    run.summary["own_parts"] = {"filter": evil, "model": evil}
    run.summary["command"] = evil
    browser.open(write_page([run, history(seed=1)], tmp_path / "page.html", title=evil))
    assert browser.js("return window.broken") is None
    assert browser.find("h1").text == evil
    assert browser.problems() == []


def test_many_runs_are_drawn_within_two_seconds(browser: Browser, many: Path) -> None:
    browser.open(many)
    assert int(browser.js("return document.documentElement.dataset.ready")) < 2000
    assert len(browser.lines()) == 7
    assert browser.problems() == []


def test_runs_without_a_filter_stand_beside_every_score(tmp_path: Path) -> None:
    runs = [history("fedavg"), history("fedca"), history("fedcm-ts"), history("fedca", score="cross-entropy")]
    runs += [history("fedpdp", alpha=5.0), history("fedavg", score="cross-entropy", alpha=5.0)]
    found = content(write_page(runs, tmp_path / "page.html"))
    parts = [(list(setting["runs"]), setting["score"], setting["config"]["alpha"]) for setting in found["settings"]]
    assert parts == [
        (["fedavg", "fedca", "fedcm-ts"], "accuracy", "0.1"),
        (["fedavg", "fedca"], "cross-entropy", "0.1"),
        (["fedpdp", "fedavg"], "accuracy", "5"),
    ]
    assert found["runs"] == 6
