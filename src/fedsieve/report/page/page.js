"use strict";
(() => {
  const report = JSON.parse(document.getElementById("data").textContent);
  const toolbar = document.getElementById("toolbar");
  const contents = document.getElementById("contents");
  const sections = document.getElementById("sections");
  const tip = document.getElementById("tip");
  const PRINTED_WIDTH = 680;
  const STAGES = ["#56B4E9", "#0072B2", "#E69F00", "#D55E00", "#009E73", "#CC79A7", "#777777"];
  const SCORES = [
    { field: "score", name: "models kept", colour: "#0072B2", dash: "" },
    { field: "scoreOfAll", name: "all models", colour: "#E69F00", dash: "7 4" },
    { field: "scoreOfSingle", name: "best single model", colour: "#777777", dash: "2 4" },
  ];
  const hidden = new Set(); // algorithms that are switched off
  let setting = report.settings[0];
  let zoom = null; // [first, last] round, the same for all charts over rounds
  let charts = []; // what has to be drawn again when the page changes
  let printing = false;

  // ---- elements -------------------------------------------------------------------------------------------------

  function fill(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value !== false && value != null) node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.flat().filter((child) => child != null));
    return node;
  }
  const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
  const svg = (tag, attributes = {}, ...children) =>
    fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

  const title = (name) => report.algorithms[name].title;
  const shown = () => Object.keys(setting.runs).filter((name) => !hidden.has(name));
  const own = (colour) => `--own-light:${colour};--own-dark:${onDark(colour)}`;
  const ownOf = (name) => own(report.algorithms[name].colour);
  const swatch = (colour) => el("span", { class: "swatch own", style: own(colour), "aria-hidden": "true" });

  /** The colour, mixed with white until it can be seen on the dark page. */
  function onDark(colour) {
    let parts = [1, 3, 5].map((start) => parseInt(colour.slice(start, start + 2), 16));
    const light = (part) => (part / 255 <= 0.04045 ? part / 3294.6 : ((part / 255 + 0.055) / 1.055) ** 2.4);
    while (0.2126 * light(parts[0]) + 0.7152 * light(parts[1]) + 0.0722 * light(parts[2]) < 0.18) {
      parts = parts.map((part) => Math.min(255, Math.round(part + (255 - part) * 0.1)));
    }
    return `rgb(${parts.join(",")})`;
  }

  // ---- numbers --------------------------------------------------------------------------------------------------

  const percent = (value, digits = 1) => `${(100 * value).toFixed(digits)} %`;
  const short = (name) => (name.length > 20 ? `${name.slice(0, 19)}…` : name);
  const plain = (value) => String(Number(value.toPrecision(4)));
  const count = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;
  const limits = (low, value, high) => Math.min(high, Math.max(low, value));

  function spread(values) {
    const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
    const squares = values.reduce((sum, value) => sum + (value - mean) ** 2, 0);
    return { mean, std: values.length > 1 ? Math.sqrt(squares / (values.length - 1)) : 0 };
  }

  /** Mean and band over runs, round by round; a round counts the runs that came to it. */
  function curve(runs, field) {
    const lists = runs.map((run) => run[field]).filter(Boolean);
    const points = [];
    for (let at = 0; at < Math.max(0, ...lists.map((list) => list.length)); at++) {
      const values = lists.map((list) => list[at]).filter((value) => value != null);
      if (!values.length) continue;
      const { mean, std } = spread(values);
      points.push({ x: at + 1, mean, low: mean - std, high: mean + std, missing: runs.length - values.length });
    }
    return points;
  }

  function ticks(low, high, wanted) {
    const rough = (high - low) / Math.max(1, wanted);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough * 0.999) * power;
    const found = [];
    for (let tick = Math.ceil(low / step - 1e-9) * step; tick <= high + step * 1e-9; tick += step) {
      found.push(Math.abs(tick) < step * 1e-9 ? 0 : tick);
    }
    return found;
  }
  const wholeTicks = (low, high, wanted) => ticks(low, high, wanted).filter(Number.isInteger);

  // ---- the box with values ---------------------------------------------------------------------------------------

  /** At (x, y) of the window, beside that point or, where there is no room, below or above the chart's rectangle. */
  function showTip(x, y, chart, heading, lines) {
    const rows = lines.map(({ colour, name, text }) =>
      el("tr", {}, el("th", {}, colour ? swatch(colour) : null, name), el("td", {}, text)));
    tip.replaceChildren(el("strong", {}, heading), rows.length ? el("table", {}, el("tbody", {}, rows)) : "");
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const left = x + 16 + box.width < innerWidth ? x + 16 : x - 16 - box.width;
    const beside = left >= 4;
    const outside = chart.bottom + 4 + box.height < innerHeight ? chart.bottom + 4 : chart.top - box.height - 4;
    tip.style.left = `${limits(4, left, innerWidth - box.width - 4)}px`;
    tip.style.top = `${limits(4, beside ? y - box.height / 2 : outside, innerHeight - box.height - 4)}px`;
  }
  const hideTip = () => { tip.hidden = true; };

  // ---- charts ----------------------------------------------------------------------------------------------------

  function canvas(host, options, draw) {
    const picture = svg("svg", { role: "img", tabindex: "0" });
    host.append(picture);
    host.classList.add("chart");
    const chart = {
      draw() {
        const width = printing ? PRINTED_WIDTH / (host.closest(".panels") ? 2 : 1) : host.clientWidth;
        if (!width) return;
        draw(picture, width);
        picture.setAttribute("aria-label", options.describe());
      },
    };
    charts.push(chart);
    return { picture, chart };
  }

  function frame(picture, width, height) {
    picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
    picture.replaceChildren();
  }

  /** Lines over rounds with bands. Options: series() → [{name, colour, dash, points}], describe(), format(value),
      axis, tick(value), range [least, most], fromZero, endNames, rounds() that lines have (default: all), single (only the line nearest to the pointer is named), front() → a line's name. */
  function lineChart(host, options) {
    let series = [], scale = null, at = null, front = null, overlay = null, dragFrom = null;
    host.classList.add("lines");
    const { picture, chart } = canvas(host, options, draw);

    function draw(_, width) {
      series = options.series();
      const height = Math.round(limits(200, width * 0.42, 340));
      frame(picture, width, height);
      const named = options.endNames && width > 560;
      const right = named ? 22 + 7.6 * Math.max(4, ...series.map((one) => short(one.name).length)) : 12;
      const box = { left: 50, right: width - right, top: 8, bottom: height - 36 };
      const all = Math.max(1, setting.rounds);
      const [first, last] = zoom ?? [1, all];
      const seen = series.flatMap((one) => one.points.filter((point) => point.x >= first && point.x <= last));
      if (!seen.length) {
        picture.append(svg("text", { class: "nothing", x: width / 2, y: height / 2 }, "nothing to show"));
        overlay = null;
        return;
      }
      let low = Infinity, high = -Infinity;
      for (const point of seen) { low = Math.min(low, point.low); high = Math.max(high, point.high); }
      const room = (high - low || Math.abs(high) || 1) * 0.05;
      const [least, most] = options.range ?? [-Infinity, Infinity];
      low = options.fromZero && !zoom ? 0 : Math.max(least, low - room);
      high = Math.min(most, high + room);
      const from = last > first ? first : first - 0.5, to = last > first ? last : last + 0.5;
      scale = {
        box, from, to,
        x: (value) => box.left + (value - from) / (to - from) * (box.right - box.left),
        y: (value) => box.bottom - (value - low) / (high - low) * (box.bottom - box.top),
        round: (x) => limits(first, Math.round(from + (x - box.left) / (box.right - box.left) * (to - from)), last),
        value: (y) => low + (box.bottom - y) / (box.bottom - box.top) * (high - low),
      };
      const clip = `clip-${charts.indexOf(chart)}`;
      picture.append(svg("clipPath", { id: clip }, svg("rect", {
        x: box.left, y: box.top - 4, width: box.right - box.left + 2, height: box.bottom - box.top + 8,
      })));
      for (const tick of ticks(low, high, height / 45)) {
        picture.append(
          svg("line", { class: "grid", x1: box.left, x2: box.right, y1: scale.y(tick), y2: scale.y(tick) }),
          svg("text", { x: box.left - 6, y: scale.y(tick) + 4, "text-anchor": "end" }, options.tick(tick)));
      }
      for (const tick of wholeTicks(from, to, width / 90)) {
        picture.append(svg("text", { x: scale.x(tick), y: box.bottom + 16, "text-anchor": "middle" }, tick));
      }
      picture.append(
        svg("text", { x: (box.left + box.right) / 2, y: height - 4, "text-anchor": "middle" }, "round"),
        svg("text", { transform: `translate(11 ${(box.top + box.bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, options.axis));
      const lines = svg("g", { "clip-path": `url(#${clip})`, class: options.single ? "thin" : null });
      for (const one of series) lines.append(line(one, options.single));
      overlay = svg("g", { "clip-path": `url(#${clip})` });
      picture.append(lines, overlay);
      if (named) nameEnds(box, last);
      mark();
    }

    const step = () => { const [first, second] = options.rounds?.() ?? []; return second == null ? 1 : second - first; };

    function line(one, thin) {
      const segments = [];
      for (const point of one.points) {
        const before = segments.at(-1)?.at(-1);
        if (before && before.x + step() >= point.x) segments.at(-1).push(point);
        else segments.push([point]);
      }
      const to = (value) => (point) => `${scale.x(point.x).toFixed(1)},${scale.y(point[value]).toFixed(1)}`;
      const middle = segments.map((part) => `M${part.map(to("mean")).join("L")}${part.length > 1 ? "" : "h.01"}`);
      const bands = segments.filter((part) => part.some((point) => point.high > point.low)).map((part) =>
        `M${part.map(to("high")).join("L")}L${[...part].reverse().map(to("low")).join("L")}Z`);
      return svg("g", { class: "own", style: own(one.colour), "data-name": one.name },
        bands.length && !thin ? svg("path", { class: "band", d: bands.join("") }) : null,
        svg("path", { class: "mean", d: middle.join(""), "stroke-dasharray": one.dash }));
    }

    function nameEnds(box, last) {
      const ends = series.map((one) => ({ one, point: one.points.filter((point) => point.x <= last).at(-1) }))
        .filter(({ point }) => point).sort((a, b) => b.point.mean - a.point.mean);
      let below = -Infinity;
      const places = ends.map(({ point }) => (below = Math.max(scale.y(point.mean), below + 15)));
      let above = box.bottom + 8;
      for (let k = places.length - 1; k >= 0; k--) above = (places[k] = Math.min(places[k], above)) - 15;
      ends.forEach(({ one }, k) => picture.append(
        svg("circle", { class: "own dot", style: own(one.colour), cx: box.right + 8, cy: places[k], r: 4.5 }),
        svg("text", { class: "name", x: box.right + 15, y: places[k] + 4 }, short(one.name))));
    }

    /** Draw what the pointer, the keyboard or a choice points at. */
    function mark() {
      if (!overlay) return;
      overlay.replaceChildren();
      const chosen = series.find((one) => one.name === (front ?? options.front?.()));
      if (chosen) {
        const group = line(chosen);
        group.classList.add("front");
        overlay.append(group);
      }
      if (at == null) return;
      overlay.append(svg("line", { class: "guide", x1: scale.x(at), x2: scale.x(at), y1: scale.box.top, y2: scale.box.bottom }));
      for (const one of options.single ? [chosen].filter(Boolean) : series) {
        const point = one.points.find((point) => point.x === at);
        if (point) overlay.append(svg("circle", { class: "own dot", style: own(one.colour), cx: scale.x(at), cy: scale.y(point.mean), r: 4.5 }));
      }
    }

    function point(round, y) {
      if (!scale || !overlay) return;
      const known = options.rounds?.() ?? [];
      if (known.length) round = known.reduce((best, each) => (Math.abs(each - round) < Math.abs(best - round) ? each : best));
      at = round;
      const found = series.map((one) => ({ one, point: one.points.find((point) => point.x === round) }))
        .filter((each) => each.point);
      if (options.single && y != null) {
        const value = scale.value(y);
        found.sort((a, b) => Math.abs(a.point.mean - value) - Math.abs(b.point.mean - value));
        front = found[0]?.one.name ?? null;
      }
      mark();
      const named = options.single
        ? found.filter(({ one }) => one.name === (front ?? options.front?.()))
        : found.sort((a, b) => b.point.mean - a.point.mean);
      const box = picture.getBoundingClientRect();
      const stretch = box.width / picture.viewBox.baseVal.width;
      const height = y ?? (named[0] ? scale.y(named[0].point.mean) : scale.box.top);
      showTip(box.left + scale.x(round) * stretch, box.top + height * stretch, box, `round ${round}`,
        named.map(({ one, point }) => ({ colour: one.colour, name: one.name, text: options.format(point) })));
    }

    function leave() {
      at = front = null;
      mark();
      hideTip();
    }

    function place(event) {
      const box = picture.getBoundingClientRect();
      const stretch = picture.viewBox.baseVal.width / box.width;
      return { x: (event.clientX - box.left) * stretch, y: (event.clientY - box.top) * stretch };
    }

    function dragged(event) {
      const x = place(event).x;
      return dragFrom != null && Math.abs(x - dragFrom) > 8 ? [Math.min(x, dragFrom), Math.max(x, dragFrom)] : null;
    }

    picture.addEventListener("pointerdown", (event) => {
      if (!overlay || event.button !== 0) return;
      dragFrom = place(event).x;
      picture.setPointerCapture(event.pointerId);
    });
    picture.addEventListener("pointermove", (event) => {
      if (!overlay) return;
      const { x, y } = place(event);
      point(scale.round(x), y);
      const range = dragged(event);
      if (range) {
        const [left, right] = range.map((edge) => limits(scale.box.left, edge, scale.box.right));
        overlay.append(svg("rect", { class: "brush", x: left, width: right - left, y: scale.box.top, height: scale.box.bottom - scale.box.top }));
      }
    });
    picture.addEventListener("pointerup", (event) => {
      const range = overlay ? dragged(event) : null;
      dragFrom = null;
      if (range) zoomTo(scale.round(range[0]), scale.round(range[1]));
      else if (overlay && event.pointerType !== "mouse") point(scale.round(place(event).x), place(event).y);
    });
    picture.addEventListener("pointercancel", () => { dragFrom = null; leave(); });
    picture.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") leave(); });
    picture.addEventListener("dblclick", () => zoomTo(null));
    picture.addEventListener("blur", leave);
    picture.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !overlay) return;
      const [first, last] = zoom ?? [1, setting.rounds];
      const steps = { ArrowLeft: at == null ? last : at - step(), ArrowRight: at == null ? first : at + step(), Home: first, End: last };
      if (event.key in steps) point(limits(first, steps[event.key], last));
      else if (event.key === "+" || event.key === "=") zoomBy(0.5, at);
      else if (event.key === "-") zoomBy(2, at);
      else if (event.key === "Escape") { leave(); zoomTo(null); }
      else return;
      event.preventDefault();
    });
    return chart;
  }

  /** Coloured cells. Options: columns(), rows(), firstColumn (its number), columnName(k), rowName(k), xAxis, yAxis, shade(column, row) → 0 (nothing)
      to 1, or the place in `fills`; tell(column, row) → [heading, lines]; describe(). */
  function cellChart(host, options) {
    let at = null, box = null, size = null, overlay = null;
    const { picture, chart } = canvas(host, options, draw);

    function draw(_, width) {
      const { columns, rows } = options;
      const step = limits(options.least ?? 2, (options.height ?? 260) / rows(), 22);
      const height = Math.round(rows() * step + 44);
      frame(picture, width, height);
      box = { left: 42, right: width - 14, top: 6, bottom: height - 38 };
      size = { x: (box.right - box.left) / columns(), y: step };
      const gap = (side) => (side > 5 ? 1 : 0);
      const cells = svg("g", { class: "cells" });
      cells.append(svg("rect", { x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top, fill: "var(--empty)" }));
      const paths = new Map();
      for (let row = 0; row < rows(); row++) {
        for (let column = 0; column < columns(); column++) {
          const shade = options.shade(column, row);
          if (!shade) continue;
          const x = (box.left + column * size.x).toFixed(1), y = (box.top + row * size.y).toFixed(1);
          const wide = (size.x - gap(size.x)).toFixed(1), tall = (size.y - gap(size.y)).toFixed(1);
          if (!paths.has(shade)) paths.set(shade, []);
          paths.get(shade).push(`M${x} ${y}h${wide}v${tall}h-${wide}z`);
        }
      }
      for (const [shade, parts] of paths) {
        const look = options.fills ? { fill: options.fills[shade] } : { fill: "var(--strong)", "fill-opacity": shade };
        cells.append(svg("path", { ...look, d: parts.join("") }));
      }
      picture.append(cells);
      const middle = (k, side, start) => start + (k + 0.5) * side;
      const first = options.firstColumn ?? 0;
      for (const tick of wholeTicks(first, first + (columns() - 1 || 0.5), Math.min(columns(), width / 60))) {
        const k = tick - first;
        picture.append(svg("text", { x: middle(k, size.x, box.left), y: box.bottom + 14, "text-anchor": "middle" }, options.columnName(k)));
      }
      for (const k of wholeTicks(0, rows() - 1 || 0.5, Math.min(rows(), height / 22))) {
        picture.append(svg("text", { x: box.left - 5, y: middle(k, size.y, box.top) + 4, "text-anchor": "end" }, options.rowName(k)));
      }
      picture.append(
        svg("text", { x: (box.left + box.right) / 2, y: height - 6, "text-anchor": "middle" }, options.xAxis),
        svg("text", { transform: `translate(11 ${(box.top + box.bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, options.yAxis));
      overlay = svg("g");
      picture.append(overlay);
      at = null;
    }

    function point(column, row) {
      at = { column, row };
      const x = box.left + column * size.x, y = box.top + row * size.y;
      overlay.replaceChildren(svg("rect", { class: "cursor", x, y, width: size.x, height: size.y }));
      const outside = picture.getBoundingClientRect();
      const stretch = outside.width / picture.viewBox.baseVal.width;
      showTip(outside.left + (x + size.x) * stretch, outside.top + (y + size.y / 2) * stretch, outside, ...options.tell(column, row));
    }

    function leave() {
      at = null;
      overlay?.replaceChildren();
      hideTip();
    }

    function follow(event) {
      if (!overlay) return;
      const outside = picture.getBoundingClientRect();
      const stretch = picture.viewBox.baseVal.width / outside.width;
      const column = Math.floor(((event.clientX - outside.left) * stretch - box.left) / size.x);
      const row = Math.floor(((event.clientY - outside.top) * stretch - box.top) / size.y);
      if (column < 0 || row < 0 || column >= options.columns() || row >= options.rows()) leave();
      else point(column, row);
    }
    picture.addEventListener("pointermove", follow);
    picture.addEventListener("pointerdown", follow);
    picture.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") leave(); });
    picture.addEventListener("blur", leave);
    picture.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
      if (event.key === "Escape") return leave();
      if (!(event.key in moves) || !overlay) return;
      const [right, down] = at ? moves[event.key] : [0, 0];
      point(limits(0, (at?.column ?? 0) + right, options.columns() - 1), limits(0, (at?.row ?? 0) + down, options.rows() - 1));
      event.preventDefault();
    });
    return chart;
  }

  const legend = (items) => el("ul", { class: "legend" }, items.map(([mark, text]) => el("li", {}, mark, text)));
  const patch = (look) => el("span", { class: "swatch", style: look, "aria-hidden": "true" });

  function shadeLegend(low, high) {
    const steps = [0.2, 0.4, 0.6, 0.8, 1].map((share) => patch(`background:var(--strong);opacity:${share};margin:0;border-radius:0`));
    return legend([[el("span", {}, low, " ", patch("background:var(--empty);margin:0;border-radius:0"), steps, " ", high), ""]]);
  }

  function choice(label, options, onchange) {
    const select = el("select", { onchange: () => onchange(select.value) },
      options.map(([value, text]) => el("option", { value }, text)));
    return { select, label: el("label", {}, label, select) };
  }

  /** A choice among runs, all of which have what the section shows. */
  function runChoice(has, onchange) {
    const runs = Object.entries(setting.runs).flatMap(([name, list]) =>
      list.filter((run) => run[has]).map((run) => ({ name, run })));
    return runs.length === 0 ? null : {
      runs,
      ...choice("Run", runs.map(({ name, run }, k) => [k, `${title(name)}, seed ${run.seed}`]), (k) => onchange(runs[k])),
    };
  }

  // ---- sections --------------------------------------------------------------------------------------------------

  function section(id, heading, sentence) {
    const part = el("section", { id, "aria-labelledby": `${id}-heading` },
      el("h2", { id: `${id}-heading` }, heading), el("p", {}, sentence));
    sections.append(part);
    contents.append(el("a", { href: `#${id}` }, heading));
    return part;
  }

  function summary() {
    const { lines } = setting;
    const first = lines[0];
    const target = first ? percent(first.final[0]) : "";
    const part = section("summary", "Summary",
      "Test accuracy of each algorithm in %, as mean ± standard deviation over seeds; the highest mean of the last ten rounds is bold.");
    if (first) {
      const best = Math.max(...lines.map((line) => line.last[0]));
      const pair = ([mean, std]) => `${(100 * mean).toFixed(1)} ±\u00a0${(100 * std).toFixed(1)}`;
      const rounds = (line) => (line.rounds ? `${line.rounds[0].toFixed(1)} (${line.reached}/${line.seeds})` : "–");
      part.append(el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Summary table" },
        el("table", { class: "summary" },
          el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Algorithm"),
            ["Seeds", "Final", "Best", "Last 10", `Rounds to ${target}`].map((name) => el("th", { class: "number", scope: "col" }, name)))),
          el("tbody", {}, lines.map((line) => el("tr", { class: line.last[0] === best ? "best" : null },
            el("th", { scope: "row" }, swatch(report.algorithms[line.algorithm].colour), title(line.algorithm)),
            [line.seeds, pair(line.final), pair(line.best), pair(line.last), rounds(line)].map((text) => el("td", { class: "number" }, text))))))),
      el("p", { class: "note" }, `Rounds to ${target}: the mean round at which runs first came to ${title(first.algorithm)}'s final accuracy, and how many of them did.`));
    }
    if (setting.unfinished.length) {
      part.append(el("p", { class: "note" },
        `Not finished, so in the curves as far as they came but not in this table: ${setting.unfinished.join("; ")}.`));
    }
  }

  const metricSeries = (field) => () => shown().map((name) => ({
    name: title(name), colour: report.algorithms[name].colour, points: curve(setting.runs[name], field),
  }));
  const without = (runs) => (runs ? ` (without ${count(runs, "run")})` : "");
  const inPercent = ({ mean, high, low, missing }) => `${percent(mean)} ± ${(50 * (high - low)).toFixed(1)}${without(missing)}`;
  const inNumbers = ({ mean, high, low, missing }) => `${plain(mean)} ± ${plain((high - low) / 2)}${without(missing)}`;

  function curves() {
    const part = section("curves", "Accuracy and loss over rounds",
      "Each line is the mean over an algorithm's seeds after every round, and its band is one standard deviation to both sides.");
    part.append(el("p", { class: "note hint" },
      "Point at a chart for its values; drag across it to zoom in, double-click to see all again. By keyboard: arrows, + and −, Escape."));
    const describe = (what, field, format) => () => `${what} over ${setting.rounds} rounds. ` + shown().map((name) => {
      const end = curve(setting.runs[name], field).at(-1);
      return end ? `${title(name)} ends at ${format(end.mean)}.` : "";
    }).join(" ");
    const accuracy = el("div", { id: "accuracy-chart" });
    const losses = el("div", { class: "panels two" });
    part.append(el("h3", {}, "Test accuracy"), accuracy, losses);
    lineChart(accuracy, {
      series: metricSeries("accuracy"), describe: describe("Test accuracy", "accuracy", percent), format: inPercent,
      axis: "test accuracy (%)", tick: (value) => plain(100 * value), fromZero: true, range: [0, 1], endNames: true,
    });
    for (const [field, name] of [["testLoss", "Test loss"], ["trainLoss", "Training loss of the clients"]]) {
      const host = el("div");
      losses.append(el("div", { class: "chart" }, el("h3", {}, name), host));
      lineChart(host, {
        series: metricSeries(field), describe: describe(name, field, plain), format: inNumbers, axis: "loss", tick: plain,
        range: [0, Infinity],
      });
    }
  }

  function roundsToTarget() {
    const reached = Object.values(setting.runs).flat().flatMap((run) => run.accuracy ?? []).filter((value) => value != null);
    if (!reached.length) return;
    const part = section("target", "Rounds to a target",
      "How many rounds each algorithm needs to reach a test accuracy that you choose: the bar is the mean over the runs that reach it, every dot is one run.");
    const start = setting.lines[0]?.final[0] ?? Math.max(...reached) * 0.9;
    let target = start;
    const output = el("output");
    const slider = el("input", {
      type: "range", id: "target-slider", min: 0, max: Math.ceil(1000 * Math.max(...reached)) / 10, step: 0.1,
      value: 100 * start, oninput: () => { target = Number(slider.value) / 100; drawn.draw(); },
    });
    const bars = el("div", { class: "bars" });
    part.append(el("div", { class: "controls" }, el("label", {}, "Target", slider, output)), bars);
    const drawn = {
      draw() {
        output.textContent = percent(target);
        slider.setAttribute("aria-valuetext", output.textContent);
        bars.replaceChildren(...shown().flatMap((name) => {
          const runs = setting.runs[name];
          const rounds = runs.map((run) => (run.accuracy ?? []).findIndex((value) => value >= target) + 1).filter(Boolean);
          const share = (value) => `${100 * value / setting.rounds}%`;
          const mean = rounds.length ? spread(rounds).mean : null;
          const text = mean == null ? "not reached" : `${mean.toFixed(1)} (${rounds.length}/${runs.length})`;
          return [
            el("span", { class: "name" }, swatch(report.algorithms[name].colour), title(name)),
            el("div", { class: "track own", style: ownOf(name), "aria-hidden": "true" },
              mean == null ? null : el("div", { class: "bar", style: `width:${share(mean)}` }),
              rounds.map((value) => el("span", { class: "seed", style: `left:${share(value)}` }))),
            el("span", { class: "value" }, text),
          ];
        }));
      },
    };
    charts.push(drawn);
    part.append(el("p", { class: "note" },
      `The full width is ${setting.rounds} rounds; in brackets, how many of the runs reach the target.`));
  }

  function dataPerClient() {
    const { examples, examplesMissing } = setting;
    const part = section("data", "Data per client", examples
      ? "How many training examples of each class every client holds: the stronger the colour, the more; the data is split anew for every seed."
      : examplesMissing);
    if (!examples) return;
    const seeds = Object.keys(examples.seeds);
    let counts, most, sizes;
    const take = (seed) => {
      counts = examples.seeds[seed];
      most = Math.max(1, ...counts.flat());
      sizes = counts.map((held) => held.reduce((sum, number) => sum + number, 0));
    };
    take(seeds[0]);
    const upTo = el("div");
    const seed = choice("Seed", seeds.map((each) => [each, each]), (value) => { take(value); redraw(); });
    const host = el("div");
    part.append(el("div", { class: "controls" }, seeds.length > 1 ? seed.label : null), upTo, host);
    const chart = cellChart(host, {
      columns: () => counts.length, rows: () => examples.classes, columnName: String, rowName: String, xAxis: "client", yAxis: "class",
      shade: (client, label) => (counts[client][label] ? limits(0.1, Math.ceil(10 * counts[client][label] / most) / 10, 1) : 0),
      tell: (client, label) => [`client ${client}`, [{ name: `class ${label}`, text: `${counts[client][label]} of ${sizes[client]} examples` }]],
      describe: () => `Examples per class and client. ${counts.length} clients hold from ${Math.min(...sizes)} to ${Math.max(...sizes)} examples, of ${
        Math.min(...counts.map((held) => held.filter(Boolean).length))} to ${Math.max(...counts.map((held) => held.filter(Boolean).length))} classes.`,
    });
    const redraw = () => { upTo.replaceChildren(shadeLegend("0", `${most} examples`)); chart.draw(); };
    upTo.replaceChildren(shadeLegend("0", `${most} examples`));
  }

  function participation() {
    const names = Object.keys(setting.runs).filter((name) => setting.runs[name].some((run) => run.participation));
    if (setting.clients > report.mostClients) {
      section("participation", "Who was asked and kept",
        `Left out: ${setting.clients} clients are more than the ${report.mostClients} that can be told apart.`);
    }
    if (!names.length) return;
    const part = section("participation", "Who was asked and kept",
      "One run of each algorithm, round by round: which clients were asked to train, and whose models went into the average.");
    const seeds = [...new Set(names.flatMap((name) => setting.runs[name].map((run) => run.seed)))].sort((a, b) => a - b);
    let seed = seeds[0];
    const panels = el("div", { class: "panels" });
    const words = ["not asked", "asked, left out", "asked and kept"];
    const fills = ["var(--empty)", "var(--left-out)", "var(--kept)"];
    const picked = choice("Seed", seeds.map((each) => [each, each]), (value) => { seed = Number(value); parts.forEach((draw) => draw()); });
    part.append(el("div", { class: "controls" }, seeds.length > 1 ? picked.label : null),
      legend(words.map((word, k) => [patch(`background:${fills[k]}`), word])), panels);
    const parts = names.map((name) => {
      const host = el("div");
      const panel = el("div", { class: "chart" }, el("h3", {}, swatch(report.algorithms[name].colour), title(name)), host);
      panels.append(panel);
      const run = () => setting.runs[name].find((each) => each.seed === seed);
      const cells = () => run()?.participation ?? "";
      const state = (round, client) => Number(cells()[round * setting.clients + client] ?? 0);
      const chart = cellChart(host, {
        columns: () => setting.rounds, rows: () => setting.clients, firstColumn: 1, columnName: (k) => k + 1, rowName: String, xAxis: "round", yAxis: "client",
        height: 200, fills, shade: state,
        tell: (round, client) => {
          const played = round * setting.clients < cells().length;
          return [`round ${round + 1}, client ${client}`, [{ name: played ? words[state(round, client)] : "not played yet", text: "" }]];
        },
        describe: () => {
          const asked = [...cells()].filter((cell) => cell !== "0").length, kept = [...cells()].filter((cell) => cell === "2").length;
          return `${title(name)}, seed ${seed}: of ${asked} models that were asked for, ${kept} were kept.`;
        },
      });
      const inner = chart.draw;
      chart.draw = () => { panel.hidden = hidden.has(name) || !run(); if (!panel.hidden) inner(); };
      return chart.draw;
    });
  }

  function bandit() {
    const note = report.detailNote;
    let chosen = null, client = ""; // the name of the line in front
    const picked = runChoice("bandit", (run) => { chosen = run; offer(); chart.draw(); });
    if (!picked) return;
    chosen = picked.runs[0];
    const part = section("bandit", "What the bandit believed",
      `How good the bandit took every client to be, one line each, after every round; the band of the client you point at or choose (at first: the one it liked best in the end) is how sure it was. ${note}`);
    const who = choice("Client", [], (value) => { client = value; chart.draw(); });
    const offer = () => {
      who.select.replaceChildren(el("option", { value: "" }, "none"),
        ...chosen.run.bandit.clients.map((id) => el("option", { value: `client ${id}` }, id)));
      const end = chosen.run.bandit.mean.at(-1);
      client = `client ${chosen.run.bandit.clients[end.indexOf(Math.max(...end.map((value) => value ?? -Infinity)))]}`;
      who.select.value = client;
    };
    offer();
    const host = el("div");
    part.append(el("div", { class: "controls" }, picked.label, who.label), host);
    const chart = lineChart(host, {
      single: true, front: () => client, axis: "expected reward", tick: plain,
      rounds: () => chosen.run.bandit.rounds,
      series: () => {
        const { rounds, clients, mean, low, high } = chosen.run.bandit;
        return clients.map((id, k) => ({
          name: `client ${id}`, colour: report.algorithms[chosen.name].colour,
          points: rounds.map((x, at) => ({
            x, mean: mean[at][k], low: low[at][k] ?? mean[at][k], high: high[at][k] ?? mean[at][k], unsure: high[at][k] == null,
          })).filter((point) => point.mean != null),
        }));
      },
      format: (point) => (point.unsure ? `${plain(point.mean)} (no bound yet)` : `${plain(point.mean)} (${plain(point.low)} to ${plain(point.high)})`),
      describe: () => {
        const { clients, mean } = chosen.run.bandit;
        const order = clients.map((id, k) => [id, mean.at(-1)[k]]).filter(([, value]) => value != null).sort((a, b) => b[1] - a[1]);
        const [best, worst] = [order[0], order.at(-1)];
        return `${title(chosen.name)}, seed ${chosen.run.seed}: the bandit's mean for ${clients.length} clients.` +
          (best ? ` At the end, client ${best[0]} is highest with ${plain(best[1])} and client ${worst[0]} lowest with ${plain(worst[1])}.` : "");
      },
    });
  }

  function perClass() {
    let chosen = null, at = 0;
    const picked = runChoice("perClass", (run) => { chosen = run; offer(); redraw(); });
    if (!picked) return;
    chosen = picked.runs[0];
    const part = section("classes", "Accuracy per class and client",
      `How well the model that each client sent back knows every class, in the round you choose; the stronger the colour, the better; a client that is not listed sent no model then. ${report.detailNote}`);
    const slider = el("input", { type: "range", min: 0, step: 1, oninput: () => { at = Number(slider.value); redraw(); } });
    const output = el("output");
    const offer = () => {
      slider.max = chosen.run.perClass.rounds.length - 1;
      at = Math.min(at, Number(slider.max));
    };
    offer();
    at = slider.max;
    slider.value = at;
    const table = () => chosen.run.perClass.clients[at];
    const clients = () => Object.keys(table()).sort((a, b) => a - b);
    const classes = () => Math.max(...Object.values(table()).map((shares) => shares.length));
    const share = (column, row) => table()[clients()[row]][column];
    const host = el("div");
    part.append(el("div", { class: "controls" }, picked.label, el("label", {}, "Round", slider, output)), shadeLegend("0 %", "100 %"), host);
    const chart = cellChart(host, {
      columns: classes, rows: () => clients().length, columnName: String, rowName: (k) => clients()[k], xAxis: "class", yAxis: "client",
      height: 320, least: 3,
      shade: (column, row) => (share(column, row) ? limits(0.05, Math.ceil(20 * share(column, row)) / 20, 1) : 0),
      tell: (column, row) => [`client ${clients()[row]}`, [{
        name: `class ${column}`, text: share(column, row) == null ? "unknown" : percent(share(column, row)),
      }]],
      describe: () => {
        const means = clients().map((id) => [id, spread(table()[id].filter((value) => value != null)).mean]).sort((a, b) => b[1] - a[1]);
        return `${title(chosen.name)}, seed ${chosen.run.seed}, round ${chosen.run.perClass.rounds[at]}: accuracy per class of ${means.length} clients' models, on average from ${
          percent(means.at(-1)[1])} for client ${means.at(-1)[0]} to ${percent(means[0][1])} for client ${means[0][0]}.`;
      },
    });
    const say = () => { output.textContent = chosen.run.perClass.rounds[at]; slider.setAttribute("aria-valuetext", `round ${output.textContent}`); };
    const redraw = () => { say(); chart.draw(); };
    say();
  }

  function scores() {
    const names = Object.keys(setting.runs).filter((name) => setting.runs[name].some((run) => run.score));
    if (!names.length) return;
    const every = Object.values(setting.runs).flat();
    const kinds = SCORES.filter(({ field }) => every.some((run) => run[field]));
    const share = setting.score === "accuracy";
    const part = section("scores", "Score of the models kept",
      kinds.length > 1
        ? "What the average of the models kept scores on validation data, against averaging all of them and against the best of them alone; means over seeds."
        : "What the average of the models kept scores on validation data; mean over seeds.");
    const panels = el("div", { class: "panels two" });
    if (kinds.length > 1) {
      part.append(legend(kinds.map(({ name, colour, dash }) => [
        svg("svg", { viewBox: "0 0 26 8", "aria-hidden": "true", class: "own", style: own(colour) },
          svg("path", { class: "mean", d: "M1 4H25", "stroke-dasharray": dash })), name])));
    }
    part.append(panels);
    for (const name of names) {
      const host = el("div");
      const panel = el("div", { class: "chart" }, el("h3", {}, swatch(report.algorithms[name].colour), title(name)), host);
      panels.append(panel);
      const series = () => kinds.map((kind) => ({ ...kind, points: curve(setting.runs[name], kind.field) })).filter(({ points }) => points.length);
      const chart = lineChart(host, {
        series, axis: share ? "accuracy (%)" : "log-likelihood", tick: share ? (value) => plain(100 * value) : plain,
        format: share ? inPercent : inNumbers, range: share ? [0, 1] : null,
        describe: () => `${title(name)}: ` + series().map(({ name: kind, points }) =>
          `${kind} ends at ${share ? percent(points.at(-1).mean) : plain(points.at(-1).mean)}`).join(", ") + ".",
      });
      const inner = chart.draw;
      chart.draw = () => { panel.hidden = hidden.has(name); if (!panel.hidden) inner(); };
    }
  }

  function timePerStage() {
    const names = Object.keys(setting.runs).filter((name) => setting.runs[name].some((run) => run.phases));
    if (!names.length) return;
    const stages = Object.keys(report.phases);
    const means = Object.fromEntries(names.map((name) => {
      const runs = setting.runs[name].filter((run) => run.phases);
      return [name, stages.map((_, k) => spread(runs.map((run) => run.phases[k] ?? 0)).mean)];
    }));
    const total = (name) => means[name].reduce((sum, value) => sum + value, 0);
    const milliseconds = (value) => (value >= 99.95 ? value.toFixed(0) : value.toFixed(1));
    const part = section("time", "Time per stage",
      "Where the time of a round goes, in milliseconds: mean over all rounds but the first, which warms up, and over seeds.");
    if (setting.environments.length > 1) {
      part.append(el("p", { class: "note" }, "These runs were made in different environments (see below): compare their times with care."));
    }
    const bars = el("div", { class: "bars" });
    part.append(legend(stages.map((stage, k) => [swatch(STAGES[k % STAGES.length]), `${stage}: ${report.phases[stage]}`])), bars,
      el("details", {}, el("summary", {}, "The same as numbers"), el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Milliseconds per stage" },
        el("table", {}, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Algorithm"),
          [...stages, "all"].map((stage) => el("th", { class: "number", scope: "col" }, stage)))),
        el("tbody", {}, names.map((name) => el("tr", {}, el("th", { scope: "row" }, title(name)),
          [...means[name], total(name)].map((value) => el("td", { class: "number" }, milliseconds(value))))))))));
    charts.push({
      draw() {
        const seen = names.filter((name) => !hidden.has(name));
        const longest = Math.max(...seen.map(total));
        bars.replaceChildren(...seen.flatMap((name) => [
          el("span", { class: "name" }, title(name)),
          el("div", { class: "stack", role: "img", "aria-label": stages.map((stage, k) => `${stage} ${milliseconds(means[name][k])} ms`).join(", ") },
            stages.map((stage, k) => el("span", {
              class: "own", style: `${own(STAGES[k % STAGES.length])};width:${100 * means[name][k] / longest}%`,
              onpointermove: (event) => showTip(event.clientX, event.clientY, event.target.getBoundingClientRect(), title(name), [{ colour: STAGES[k % STAGES.length], name: stage, text: `${milliseconds(means[name][k])} ms` }]),
              onpointerleave: hideTip,
            }))),
          el("span", { class: "value" }, `${milliseconds(total(name))} ms`),
        ]));
      },
    });
  }

  function configuration() {
    const part = section("configuration", "Configuration and environment",
      "Everything that defines these runs and where they were made, so that they can be made again.");
    const table = (head, rows) => el("div", { class: "wide" }, el("table", {},
      el("thead", {}, el("tr", {}, head.map((name, k) => el("th", { scope: "col", class: k === 2 ? "about" : null }, name)))), el("tbody", {}, rows)));
    part.append(el("details", {}, el("summary", {}, "Configuration"), table(["Field", "Value", "Meaning"],
      Object.entries(setting.config).map(([name, value]) => el("tr", {}, el("th", { scope: "row" }, name),
        el("td", { class: report.differing.includes(name) ? "changed" : null }, value), el("td", { class: "about" }, report.fields[name]))))));
    for (const { runs, values } of setting.environments) {
      part.append(el("details", {}, el("summary", {}, `Environment of ${count(runs, "run")}`),
        table(["What", "Value"], Object.entries(values).map(([name, value]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, value))))));
    }
    if (setting.commands.length) {
      part.append(el("details", {}, el("summary", {}, setting.commands.length === 1 ? "Command" : `${setting.commands.length} commands`),
        setting.commands.map((command) => el("code", {}, command))));
    }
  }

  // ---- the page --------------------------------------------------------------------------------------------------

  const redrawAll = () => charts.forEach((chart) => chart.draw());

  function zoomTo(first, last) {
    const [low, high] = [first ?? 1, last ?? setting.rounds];
    if (high - low < 1) return;
    zoom = low <= 1 && high >= setting.rounds ? null : [low, high];
    updateZoomButtons();
    hideTip();
    redrawAll();
  }

  function zoomBy(factor, middle) {
    const [first, last] = zoom ?? [1, setting.rounds];
    const half = Math.max(1, (last - first) * factor / 2);
    const centre = limits(Math.min(1 + half, setting.rounds), middle ?? (first + last) / 2, Math.max(setting.rounds - half, 1));
    zoomTo(Math.max(1, Math.round(centre - half)), Math.min(setting.rounds, Math.round(centre + half)));
  }

  const zoomButtons = {
    in: el("button", { type: "button", "aria-label": "Zoom in on the middle rounds", onclick: () => zoomBy(0.5) }, "+"),
    out: el("button", { type: "button", "aria-label": "Zoom out", onclick: () => zoomBy(2) }, "−"),
    all: el("button", { type: "button", "aria-label": "Show all rounds", onclick: () => zoomTo(null) }, "All"),
  };
  function updateZoomButtons() {
    zoomButtons.in.disabled = setting.rounds < 3;
    zoomButtons.out.disabled = zoomButtons.all.disabled = zoom == null;
  }

  function toggle(name) {
    const button = el("button", {
      type: "button", "aria-pressed": String(!hidden.has(name)), "data-algorithm": name,
      onclick: () => {
        if (!hidden.delete(name)) hidden.add(name);
        button.setAttribute("aria-pressed", String(!hidden.has(name)));
        redrawAll();
      },
    }, swatch(report.algorithms[name].colour), title(name));
    return button;
  }

  const toggles = el("div", { id: "toggles", role: "group", "aria-label": "Algorithms shown" });

  function show(chosen) {
    setting = chosen;
    zoom = null;
    charts = [];
    hideTip();
    contents.replaceChildren();
    sections.replaceChildren();
    toggles.replaceChildren(...Object.keys(setting.runs).map(toggle));
    updateZoomButtons();
    for (const build of [summary, curves, roundsToTarget, dataPerClient, participation, bandit, perClass, scores, timePerStage, configuration]) build();
    redrawAll();
  }

  const every = report.settings.flatMap((each) => Object.values(each.runs).flat());
  document.getElementById("overview").textContent =
    `${count(report.runs, "run")}: ${count(Object.keys(report.algorithms).length, "algorithm")}, ` +
    `${count(new Set(every.map((run) => run.seed)).size, "seed")}, ${count(report.settings.length, "setting")}.`;
  if (report.settings.length > 1) {
    const { label } = choice("Setting ", report.settings.map((each, k) => [k, each.name]), (k) => show(report.settings[k]));
    label.querySelector("select").id = "setting";
    toolbar.append(label);
  }
  toolbar.append(toggles, el("div", { id: "zoom", role: "group", "aria-label": "Zoom" }, Object.values(zoomButtons)));
  show(setting);

  let width = sections.clientWidth;
  new ResizeObserver(() => {
    if (printing || sections.clientWidth === width) return;
    width = sections.clientWidth;
    redrawAll();
  }).observe(sections);
  let closed = [];
  addEventListener("beforeprint", () => {
    printing = true;
    closed = [...document.querySelectorAll("details:not([open])")];
    closed.forEach((part) => { part.open = true; });
    redrawAll();
  });
  addEventListener("afterprint", () => {
    printing = false;
    closed.forEach((part) => { part.open = false; });
    redrawAll();
  });
  addEventListener("scroll", hideTip, { passive: true });
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
})();
