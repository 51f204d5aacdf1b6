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
  const MEASURES = {
    rounds: { name: "Rounds", axis: "round" },
    seconds: { name: "Simulated time", axis: "simulated time", units: [["s", 1], ["min", 60], ["h", 3600], ["days", 86400]] },
    bytes: { name: "Bytes sent", axis: "bytes sent", units: [["kB", 1e3], ["MB", 1e6], ["GB", 1e9], ["TB", 1e12]] },
  };
  const STEPS = 300; // places at which curves over time and bytes are looked at
  const hidden = new Set(); // algorithms that are switched off
  let setting = report.settings[0];
  let view = "rounds"; // what accuracy and loss are drawn over
  let zooms = {}; // [first, last] by what charts are drawn over, the same for all of these
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

  /** Mean and band over runs: in every round of those that came to it; over time and bytes, of the last round by then. */
  function curve(runs, field, over = "rounds") {
    const known = runs.filter((run) => run[field] && (over === "rounds" || run[over]));
    const round = (run, x) => (over === "rounds" ? x : x > run[over].at(-1) ? 0 : countUpTo(run[over], x));
    const rounds = [1, Math.max(0, ...known.map((run) => run[field].length))];
    const points = [];
    for (const x of over === "rounds" ? places(over, rounds) : commonPlaces(known, over)) {
      const values = known.map((run) => run[field][round(run, x) - 1]).filter((value) => value != null);
      if (!values.length) continue;
      const { mean, std } = spread(values);
      points.push({ x, mean, low: mean - std, high: mean + std, missing: runs.length - values.length });
    }
    return points;
  }

  /** From where all runs have a value, to where the first of those that are finished ends. */
  function commonPlaces(runs, over) {
    const start = Math.max(...runs.map((run) => run[over][0])), end = commonEnd(runs, over);
    return [start, ...places(over), end].filter((x) => x >= start && x <= end);
  }

  function commonEnd(runs, over) {
    const finished = runs.filter((run) => run[over]?.length === setting.rounds);
    return Math.min(...(finished.length ? finished : runs.filter((run) => run[over])).map((run) => run[over].at(-1)));
  }

  /** How many of these rising numbers are at most x. */
  function countUpTo(rising, x) {
    let low = 0, high = rising.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (rising[middle] <= x) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  // ---- what charts are drawn over --------------------------------------------------------------------------------

  const isSimulated = () => Object.values(setting.runs).flat().some((run) => run.seconds);

  function whole(over) {
    if (over === "rounds") return [1, Math.max(1, setting.rounds)];
    return [0, Math.max(...Object.values(setting.runs).map((runs) => commonEnd(runs, over)).filter(Number.isFinite))];
  }
  const span = (over) => zooms[over] ?? whole(over);

  function places(over, [first, last] = span(over)) {
    if (over === "rounds") return Array.from({ length: Math.max(0, last - first + 1) }, (_, k) => first + k);
    return Array.from({ length: STEPS + 1 }, (_, k) => first + (last - first) * k / STEPS);
  }

  /** The largest unit of which the value is at least two. */
  const unitFor = (value, over) => MEASURES[over].units.findLast(([, size]) => value >= 2 * size) ?? MEASURES[over].units[0];

  function amount(value, over) {
    const [unit, size] = unitFor(value, over);
    return `${(value / size).toFixed(Math.max(0, 3 - String(Math.trunc(value / size)).length))}\u00a0${unit}`;
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

  /** Lines with bands. Options: series() → [{name, colour, dash, points}], describe(), format(value), over() → what is on
      the horizontal axis (default: rounds), axis, tick(value), range [least, most], fromZero, endNames, rounds() that
      lines have (default: all), single (only the line nearest to the pointer is named), front() → a line's name. */
  function lineChart(host, options) {
    let series = [], scale = null, at = null, front = null, overlay = null, dragFrom = null;
    let over = "rounds", known = []; // the places at which lines may have a value
    host.classList.add("lines");
    const { picture, chart } = canvas(host, options, draw);

    function draw(_, width) {
      over = options.over?.() ?? "rounds";
      series = options.series();
      const height = Math.round(limits(200, width * 0.42, 340));
      frame(picture, width, height);
      const named = options.endNames && width > 560;
      const right = named ? 22 + 7.6 * Math.max(4, ...series.map((one) => short(one.name).length)) : 12;
      const box = { left: 50, right: width - right, top: 8, bottom: height - 36 };
      const [first, last] = span(over);
      const seen = series.flatMap((one) => one.points.filter((point) => point.x >= first && point.x <= last));
      if (!seen.length) {
        picture.append(svg("text", { class: "nothing", x: width / 2, y: height / 2 }, "nothing to show"));
        overlay = null;
        return;
      }
      known = (options.rounds?.() ?? places(over)).filter((x) => x >= first && x <= last);
      if (at != null) at = nearest(at);
      let low = Infinity, high = -Infinity;
      for (const point of seen) { low = Math.min(low, point.low); high = Math.max(high, point.high); }
      const room = (high - low || Math.abs(high) || 1) * 0.05;
      const [least, most] = options.range ?? [-Infinity, Infinity];
      low = options.fromZero && !zooms[over] ? 0 : Math.max(least, low - room);
      high = Math.min(most, high + room);
      const from = last > first ? first : first - 0.5, to = last > first ? last : last + 0.5;
      scale = {
        box, from, to,
        x: (value) => box.left + (value - from) / (to - from) * (box.right - box.left),
        y: (value) => box.bottom - (value - low) / (high - low) * (box.bottom - box.top),
        place: (x) => nearest(from + (x - box.left) / (box.right - box.left) * (to - from)),
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
      const [unit, size] = over === "rounds" ? [null, 1] : unitFor(last, over);
      for (const tick of (unit ? ticks : wholeTicks)(from / size, to / size, width / 90)) {
        picture.append(svg("text", { x: scale.x(tick * size), y: box.bottom + 16, "text-anchor": "middle" }, unit ? plain(tick) : tick));
      }
      const under = MEASURES[over].axis + (unit ? ` (${unit})` : "");
      picture.append(
        svg("text", { x: (box.left + box.right) / 2, y: height - 4, "text-anchor": "middle" }, under),
        svg("text", { transform: `translate(11 ${(box.top + box.bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, options.axis));
      const lines = svg("g", { "clip-path": `url(#${clip})`, class: options.single ? "thin" : null });
      for (const one of series) lines.append(line(one, options.single));
      overlay = svg("g", { "clip-path": `url(#${clip})` });
      picture.append(lines, overlay);
      if (named) nameEnds(box, last);
      mark();
    }

    const step = () => (known.length > 1 ? known[1] - known[0] : 1);
    const nearest = (x) => known.reduce((best, each) => (Math.abs(each - x) < Math.abs(best - x) ? each : best));

    function line(one, thin) {
      const segments = [];
      for (const point of one.points) {
        const before = segments.at(-1)?.at(-1);
        if (before && before.x + 1.01 * step() >= point.x) segments.at(-1).push(point);
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

    function point(place, y) {
      if (!scale || !overlay) return;
      at = place;
      const found = series.map((one) => ({ one, point: one.points.find((point) => point.x === place) }))
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
      const heading = over === "rounds" ? `round ${place}` : `after ${amount(place, over)}`;
      showTip(box.left + scale.x(place) * stretch, box.top + height * stretch, box, heading,
        named.map(({ one, point }) => ({ colour: one.colour, name: one.name, text: options.format(point) })));
    }

    function leave() {
      at = front = null;
      mark();
      hideTip();
    }

    function pointer(event) {
      const box = picture.getBoundingClientRect();
      const stretch = picture.viewBox.baseVal.width / box.width;
      return { x: (event.clientX - box.left) * stretch, y: (event.clientY - box.top) * stretch };
    }

    function dragged(event) {
      const { x } = pointer(event);
      return dragFrom != null && Math.abs(x - dragFrom) > 8 ? [Math.min(x, dragFrom), Math.max(x, dragFrom)] : null;
    }

    picture.addEventListener("pointerdown", (event) => {
      if (!overlay || event.button !== 0) return;
      dragFrom = pointer(event).x;
      picture.setPointerCapture(event.pointerId);
    });
    picture.addEventListener("pointermove", (event) => {
      if (!overlay) return;
      const { x, y } = pointer(event);
      point(scale.place(x), y);
      const range = dragged(event);
      if (range) {
        const [left, right] = range.map((edge) => limits(scale.box.left, edge, scale.box.right));
        overlay.append(svg("rect", { class: "brush", x: left, width: right - left, y: scale.box.top, height: scale.box.bottom - scale.box.top }));
      }
    });
    picture.addEventListener("pointerup", (event) => {
      const range = overlay ? dragged(event) : null;
      dragFrom = null;
      if (range) zoomTo(over, range.map(scale.place));
      else if (overlay && event.pointerType !== "mouse") point(scale.place(pointer(event).x), pointer(event).y);
    });
    picture.addEventListener("pointercancel", () => { dragFrom = null; leave(); });
    picture.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") leave(); });
    picture.addEventListener("dblclick", () => zoomTo(over, null));
    picture.addEventListener("blur", leave);
    picture.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !overlay) return;
      const end = known.length - 1, here = known.indexOf(at);
      const steps = { ArrowLeft: at == null ? end : here - 1, ArrowRight: here + 1, Home: 0, End: end };
      if (event.key in steps) point(known[limits(0, steps[event.key], end)]);
      else if (event.key === "+" || event.key === "=") zoomBy(over, 0.5, at);
      else if (event.key === "-") zoomBy(over, 2, at);
      else if (event.key === "Escape") { leave(); zoomTo(over, null); }
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
      const columns = [
        ["Seeds", (line) => line.seeds],
        ["Final", (line) => pair(line.final)],
        ["Best", (line) => pair(line.best)],
        ["Last 10", (line) => pair(line.last)],
        [`Rounds to ${target}`, (line) => (line.rounds ? `${line.rounds[0].toFixed(1)} (${line.reached}/${line.seeds})` : "–")],
      ];
      const simulated = lines.some((line) => line.seconds), backdoor = lines.some((line) => line.backdoor);
      if (simulated) {
        for (const [field, name] of [["seconds", "Time"], ["bytes", "Bytes"]]) {
          columns.push([`${name} to ${target}`, (line) => (line[field] ? amount(line[field][0], field) : "–")]);
        }
      }
      if (backdoor) columns.push(["Backdoor", (line) => (line.backdoor ? pair(line.backdoor) : "–")]);
      part.append(el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Summary table" },
        el("table", { class: "summary" },
          el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Algorithm"),
            columns.map(([name]) => el("th", { class: "number", scope: "col" }, name)))),
          el("tbody", {}, lines.map((line) => el("tr", { class: line.last[0] === best ? "best" : null },
            el("th", { scope: "row" }, swatch(report.algorithms[line.algorithm].colour), title(line.algorithm)),
            columns.map(([, cell]) => el("td", { class: "number" }, cell(line)))))))),
      el("p", { class: "note" }, `Rounds to ${target}: the mean round at which runs first came to ${title(first.algorithm)}'s final accuracy, and how many of them did${
        simulated ? "; then the simulated time and the bytes sent, to clients and back, until it was over" : ""}.${
        backdoor ? " Backdoor: how many marked test images are taken for the class that attackers want, in % over the last ten rounds." : ""}`));
    }
    if (setting.unfinished.length) {
      part.append(el("p", { class: "note" },
        `Not finished, so in the curves as far as they came but not in this table: ${setting.unfinished.join("; ")}.`));
    }
  }

  const metricSeries = (field) => () => shown().map((name) => ({
    name: title(name), colour: report.algorithms[name].colour, points: curve(setting.runs[name], field, view),
  }));
  const without = (runs) => (runs ? ` (without ${count(runs, "run")})` : "");
  const inPercent = ({ mean, high, low, missing }) => `${percent(mean)} ± ${(50 * (high - low)).toFixed(1)}${without(missing)}`;
  const inNumbers = ({ mean, high, low, missing }) => `${plain(mean)} ± ${plain((high - low) / 2)}${without(missing)}`;

  function curves() {
    const part = section("curves", isSimulated() ? "Accuracy and loss over rounds, time and bytes" : "Accuracy and loss over rounds",
      "Each line is the mean over an algorithm's seeds after every round, and its band is one standard deviation to both sides.");
    part.append(el("p", { class: "note hint" },
      "Point at a chart for its values; drag across it to zoom in, double-click to see all again. By keyboard: arrows, + and −, Escape."));
    if (isSimulated()) part.append(...viewSwitch());
    const extent = () => (view === "rounds" ? `${setting.rounds} rounds` : `${amount(whole(view)[1], view)} ${view === "bytes" ? "sent" : "of simulated time"}`);
    const describe = (what, field, format) => () => `${what} over ${extent()}. ` + shown().map((name) => {
      const end = curve(setting.runs[name], field, view).at(-1);
      return end ? `${title(name)} ends at ${format(end.mean)}.` : "";
    }).join(" ");
    const over = () => view;
    const shares = (id, field, name) => {
      const host = el("div", { id });
      part.append(el("h3", {}, name), host);
      lineChart(host, {
        over, series: metricSeries(field), describe: describe(name, field, percent), format: inPercent,
        axis: `${name.toLowerCase()} (%)`, tick: (value) => plain(100 * value), fromZero: true, range: [0, 1], endNames: true,
      });
    };
    shares("accuracy-chart", "accuracy", "Test accuracy");
    if (Object.values(setting.runs).flat().some((run) => run.backdoor)) shares("backdoor-chart", "backdoor", "Backdoor success");
    const losses = el("div", { class: "panels two" });
    part.append(losses);
    for (const [field, name] of [["testLoss", "Test loss"], ["trainLoss", "Training loss of the clients"]]) {
      const host = el("div");
      losses.append(el("div", { class: "chart" }, el("h3", {}, name), host));
      lineChart(host, {
        over, series: metricSeries(field), describe: describe(name, field, plain), format: inNumbers, axis: "loss", tick: plain,
        range: [0, Infinity],
      });
    }
  }

  /** What accuracy and loss are drawn over, and what has to be known to read it. */
  function viewSwitch() {
    const note = el("p", { class: "note", id: "view-note" });
    const options = Object.entries(MEASURES).map(([over, { name }]) => el("label", {}, el("input", {
      type: "radio", name: "view", value: over, checked: over === view,
      onchange: () => { view = over; say(); zoomed(); },
    }), name));
    const say = () => {
      const without = view === "rounds" ? [] : Object.entries(setting.runs)
        .map(([name, runs]) => [name, runs.filter((run) => run.accuracy && !run[view]).length]).filter(([, runs]) => runs);
      note.hidden = view === "rounds";
      note.textContent = `What each run had last reached by then, averaged from where all seeds have finished a round to where the first of them ends.${
        without.length ? ` Left out, as they have no simulated time: ${without.map(([name, runs]) => `${count(runs, "run")} of ${title(name)}`).join(", ")}.` : ""}`;
    };
    say();
    return [el("fieldset", { class: "switch", "aria-label": "Draw accuracy and loss over" }, options), note];
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
          const reaching = runs.map((run) => ({ run, round: (run.accuracy ?? []).findIndex((value) => value >= target) + 1 })).filter(({ round }) => round);
          const rounds = reaching.map(({ round }) => round);
          const taken = ["seconds", "bytes"].map((over) => {
            const known = reaching.filter(({ run }) => run[over]).map(({ run, round }) => run[over][round - 1]);
            return known.length ? `, ${amount(spread(known).mean, over)}` : "";
          }).join("");
          const share = (value) => `${100 * value / setting.rounds}%`;
          const mean = rounds.length ? spread(rounds).mean : null;
          const text = mean == null ? "not reached" : `${mean.toFixed(1)} (${rounds.length}/${runs.length})${taken}`;
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
      `The full width is ${setting.rounds} rounds; in brackets, how many of the runs reach the target${
        isSimulated() ? "; then the mean of their simulated time and of the bytes sent until they do" : ""}.`));
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
    const tooMany = setting.clients > report.mostClients;
    if (!names.length && !tooMany) return;
    const part = section("participation", "Who was asked and kept", tooMany
      ? `Left out: ${setting.clients} clients are more than the ${report.mostClients} that can be told apart.`
      : "One run of each algorithm, round by round: which clients were asked to train, and whose models went into the average.");
    part.append(...sharesOfClients());
    if (!names.length) return;
    const seeds = [...new Set(names.flatMap((name) => setting.runs[name].map((run) => run.seed)))].sort((a, b) => a - b);
    let seed = seeds[0];
    const panels = el("div", { class: "panels" });
    const hostile = names.some((name) => setting.runs[name].some((run) => /[34]/.test(run.participation)));
    const words = ["not asked", "asked, left out", "asked and kept", ...(hostile ? ["hostile, left out", "hostile, kept"] : [])];
    const fills = ["var(--empty)", "var(--left-out)", "var(--kept)", "var(--hostile-left-out)", "var(--hostile-kept)"];
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
          const number = (states) => [...cells()].filter((cell) => states.includes(cell)).length;
          return `${title(name)}, seed ${seed}: of ${number("1234")} models that were asked for, ${number("24")} were kept${
            hostile ? `; of ${number("34")} from hostile clients, ${number("4")}` : ""}.`;
        },
      });
      const inner = chart.draw;
      chart.draw = () => { panel.hidden = hidden.has(name) || !run(); if (!panel.hidden) inner(); };
      return chart.draw;
    });
  }

  /** How evenly each algorithm asked its clients, and how many of those asked and kept were hostile. */
  function sharesOfClients() {
    const columns = [
      ["gini", "Gini of requests", (value) => value.toFixed(2)],
      ["hostileAsked", "Hostile of those asked", percent],
      ["hostileKept", "Hostile of those kept", percent],
    ].filter(([field]) => setting.lines.some((line) => line[field]));
    if (!columns.length) return [];
    return [
      el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "Shares of clients" }, el("table", { class: "summary" },
        el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Algorithm"), columns.map(([, name]) => el("th", { class: "number", scope: "col" }, name)))),
        el("tbody", {}, setting.lines.map((line) => el("tr", {},
          el("th", { scope: "row" }, swatch(report.algorithms[line.algorithm].colour), title(line.algorithm)),
          columns.map(([field, , format]) => el("td", { class: "number" }, line[field] ? format(line[field][0]) : "–"))))))),
      el("p", { class: "note" }, "Means over seeds. The Gini coefficient says how unevenly clients that hold data were asked: 0 if all equally often, close to 1 if few of many got all requests."),
    ];
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

  const leastZoom = (over) => (over === "rounds" ? 1 : whole(over)[1] / 1000);

  function zoomTo(over, range) {
    const [start, end] = whole(over), [low, high] = range ?? [start, end];
    if (high - low < leastZoom(over)) return;
    if (low <= start && high >= end) delete zooms[over];
    else zooms[over] = [low, high];
    zoomed();
  }

  function zoomBy(over, factor, middle) {
    const [start, end] = whole(over), [first, last] = span(over);
    const half = Math.max(leastZoom(over), (last - first) * factor / 2);
    const centre = limits(Math.min(start + half, end), middle ?? (first + last) / 2, Math.max(end - half, start));
    const range = [Math.max(start, centre - half), Math.min(end, centre + half)];
    zoomTo(over, over === "rounds" ? range.map(Math.round) : range);
  }

  function zoomed() {
    updateZoomButtons();
    hideTip();
    redrawAll();
  }

  const zoomButtons = {
    in: el("button", { type: "button", "aria-label": "Zoom in on the middle", onclick: () => zoomBy(view, 0.5) }, "+"),
    out: el("button", { type: "button", "aria-label": "Zoom out", onclick: () => zoomBy(view, 2) }, "−"),
    all: el("button", { type: "button", "aria-label": "Show everything", onclick: () => { zooms = {}; zoomed(); } }, "All"),
  };
  function updateZoomButtons() {
    zoomButtons.in.disabled = setting.rounds < 3;
    zoomButtons.out.disabled = !zooms[view];
    zoomButtons.all.disabled = !Object.keys(zooms).length;
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
    view = "rounds";
    zooms = {};
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
