"use strict";
// Draws the page from its data. Text from runs reaches the page as text nodes and never as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const SVG = "http://www.w3.org/2000/svg";

  // ---- elements and quantities ---------------------------------------------------------------

  function el(tag, attributes, ...children) {
    const node = document.createElement(tag);
    return dressed(node, attributes, children);
  }

  function draw(tag, attributes, ...children) {
    return dressed(document.createElementNS(SVG, tag), attributes, children);
  }

  function dressed(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.flat().filter((each) => each !== null && each !== undefined));
    return node;
  }

  const name = (text) => el("bdi", null, text);

  function scaled(amount, steps, base) {
    const rounded = Number(amount.toPrecision(4));
    for (const [factor, unit] of steps)
      if (Math.abs(rounded) >= factor) return `${digits(rounded / factor)}\u202f${unit}`;
    return `${digits(rounded)}\u202f${base}`;
  }

  const digits = (value, most = 4) => String(Number(value.toPrecision(most)));
  const time = (s) => scaled(s, [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]], "s");
  const brief = (s) => time(Number(s.toPrecision(3)));
  const rate = (bps) => scaled(bps, [[1e12, "Tbps"], [1e9, "Gbps"], [1e6, "Mbps"], [1e3, "kbps"]], "bps");
  const size = (bytes) => scaled(bytes, [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]], "B");
  const percent = (share, places = 0) => `${(100 * share).toFixed(places)}\u202f%`;
  const whole = (number) => number.toLocaleString("en");
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

  function ticks(low, high, wanted) {
    const rough = (high - low) / wanted;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
    const found = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(k * step);
    return found;
  }

  const PAPER = 680; // what A4 and Letter leave between their margins, in CSS pixels
  const drawings = []; // each draws itself anew for the width that it has, or has on paper
  let onPaper = false;

  function watched(frame, redraw, paperWidth) {
    let width = 0;
    const again = () => {
      const now = onPaper ? paperWidth : Math.floor(frame.clientWidth);
      if (now && now !== width) { width = now; redraw(width); }
    };
    new ResizeObserver(again).observe(frame);
    drawings.push(again);
  }

  // ---- a figure for another document ---------------------------------------------------------

  const LOOKS = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "opacity", "paint-order",
    "font-family", "font-size", "font-weight", "visibility"];

  // The style sheet stays here, so what it says of each element goes along as attributes.
  function standalone(picture, title) {
    const copy = picture.cloneNode(true), box = picture.viewBox.baseVal;
    const before = [picture, ...picture.querySelectorAll("*")], after = [copy, ...copy.querySelectorAll("*")];
    before.forEach((node, k) => {
      const style = getComputedStyle(node), around = k ? getComputedStyle(node.parentElement) : null;
      for (const look of LOOKS) {
        const value = style.getPropertyValue(look);
        if (!around || value !== around.getPropertyValue(look)) after[k].setAttribute(look, value);
      }
      for (const own of ["class", "style", "role", "aria-label"]) after[k].removeAttribute(own);
    });
    dressed(copy, { width: box.width, height: box.height }, []);
    copy.prepend(draw("title", null, title),
      draw("rect", { width: box.width, height: box.height, fill: getComputedStyle(document.body).backgroundColor }));
    return new XMLSerializer().serializeToString(copy);
  }

  function takeaway(title, picture) {
    const told = el("span", { class: "muted", role: "status" });
    const text = () => {
      const found = picture();
      if (found.isConnected) return standalone(found, title);
      const aside = el("div", { class: "aside", "aria-hidden": "true" }, found); // styles need a place in the document
      document.body.append(aside);
      const drawn = standalone(found, title);
      aside.remove();
      return drawn;
    };
    const save = () => {
      el("a", { href: `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text())}`, download: `${title.replace(/[^a-z0-9]+/gi, "-")}.svg` }).click();
      told.textContent = "saved";
    };
    const copy = () => navigator.clipboard.writeText(text()).then(() => { told.textContent = "copied"; },
      () => { told.textContent = "The browser does not allow a copy here. Save it instead."; });
    return el("p", { class: "takeaway" }, el("button", { type: "button", "aria-label": `Save SVG: ${title}`, onclick: save }, "Save SVG"),
      navigator.clipboard ? el("button", { type: "button", "aria-label": `Copy SVG: ${title}`, onclick: copy }, "Copy SVG") : null, told);
  }

  function part(title, lead, ...children) {
    const heading = el("h2", null, title);
    return el("section", { class: "part" }, heading, lead ? el("p", { class: "lead" }, lead) : null, ...children);
  }

  function folded(title, ...children) {
    return el("details", null, el("summary", null, title), ...children);
  }

  function table(headings, rows, numbers) {
    const kind = (column) => (numbers.has(column) ? "number" : null);
    const head = headings.map((each, column) => el("th", { scope: "col", class: kind(column) }, each));
    const body = rows.map((row) => el("tr", null, row.map((each, column) => el("td", { class: kind(column) }, name(each)))));
    return el("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "table" },
      el("table", null, el("thead", null, el("tr", null, head)), el("tbody", null, body)));
  }

  // ---- the sentence and the account ----------------------------------------------------------

  function opening(run, heading) {
    const found = run.explanation;
    const words = [el("b", null, name(run.name)), ...run.subtitle.map(name)];
    const alone = found.baseline_is_estimated ? "alone it would take, estimated" : "alone it takes";
    return [
      el("p", { class: "names" }, words.map((each) => el("span", null, each))),
      el(heading, { class: "verdict" }, name(run.sentence)),
      answer(run),
      el("dl", { class: "figures" },
        figure("a step takes", time(found.step_s), run.of_which_steps ? name(run.of_which_steps) : null),
        found.scaling_factor === null ? null : figure(alone, time(found.baseline_step_s), ""),
        found.scaling_factor === null ? null
          : figure("scaling factor, 1 is perfect", found.scaling_factor.toFixed(3), found.full
            ? `${found.full.scaling_factor.toFixed(3)} were its links used to the full${inTheReplayed(found)}` : ""),
      ),
    ];
  }

  // Below the verdict: how sure it is, and what to do about it.
  function answer(run) {
    const found = run.explanation, best = found.fixes[0];
    const sure = found.verdict.sureness || (found.verdict.missing.length ? `Not decided. What would settle it: ${found.verdict.missing.join("; ")}.` : null);
    const gain = best ? percent(1 - best.step_s / predictedFrom(found)) : "";
    const doing = best ? [el("b", null, name(best.change)), `: a step of ${time(best.step_s)}, ${gain} shorter${isOfReplayed(found) ? `; of the steps that are replayed, ${time(found.median_step_s)} now` : ""}. `, el("code", null, name(best.setting))]
      : run.no_fixes ? name(run.no_fixes) : null;
    const most = found.fixes.reduce((a, b) => (b.step_s < a.step_s ? b : a), best); // it may answer another loss
    if (doing && most !== best && !isOfReplayed(found))
      doing.push(el("br"), "Gains most: ", el("b", null, name(most.change)), `, a step of ${time(most.step_s)}, ${percent(1 - most.step_s / predictedFrom(found))} shorter.`);
    const line = (label, words) => (words ? el("div", null, el("dt", null, label), el("dd", null, words)) : null);
    return el("dl", { class: "answer" }, line("How sure", sure ? name(sure) : null), line("What to do", doing));
  }

  const isUneven = (found) => found.median_step_s && Math.abs(found.step_s / found.median_step_s - 1) > 0.01;

  const isOfReplayed = (found) => isUneven(found) && found.fixes_from_s === found.median_step_s;
  const inTheReplayed = (found) => (isUneven(found) ? ", in the steps that are replayed" : "");

  function figure(label, value, note) {
    return el("div", null, el("dt", null, label), el("dd", null, value, note ? el("small", null, note) : null));
  }

  function account(run) {
    const found = run.explanation;
    let reached = 0;
    const rows = Object.entries(found.account).filter(([, s]) => s > 0).map(([key, s]) => {
      const from = reached;
      reached += s;
      const mark = key !== run.blamed ? "" : found.verdict.kind === "unknown" ? "not told by this run" : "the bottleneck";
      return fallRow(data.parts[key], s, found.step_s, from, key, mark);
    });
    const total = fallRow("a step", found.step_s, found.step_s, 0, null, "");
    total.classList.add("sum");
    const section = part("Where a step goes", "Parts of a typical step, averaged over ranks. They add up to it exactly.",
      el("ol", { class: "fall" }, rows, total), takeaway("account", () => accountPicture(found, run.blamed)));
    if (run.ranks.length > 1) section.append(rankTable(run));
    return section;
  }

  function fallRow(label, s, step, from, key, mark) {
    const piece = el("i");
    piece.style.left = `${(100 * from) / step}%`;
    piece.style.width = `${(100 * s) / step}%`;
    if (key) piece.style.background = `var(--${key})`;
    return el("li", { class: mark ? "blamed" : "" },
      el("span", { class: "name" }, label, mark ? el("small", null, mark) : null), el("span", { class: "bar", "aria-hidden": "true" }, piece),
      el("span", { class: "number" }, time(s)), el("span", { class: "number muted" }, percent(s / step, 1)));
  }

  // The account as SVG, for a document: on the page it is a list, which screen readers read.
  function accountPicture(found, blamed) {
    const from = 210, wide = 360, high = 24, parts = Object.entries(found.account).filter(([, s]) => s > 0);
    let reached = 0;
    const rows = parts.flatMap(([key, s], k) => {
      const y = k * high, piece = draw("rect", { x: from + (wide * reached) / found.step_s, y: y + 5, width: Math.max((wide * s) / found.step_s, 0.5), height: 16 });
      piece.style.fill = `var(--${key})`;
      reached += s;
      const weight = key === blamed ? "600" : null;
      return [draw("text", { x: from - 10, y: y + 18, "text-anchor": "end", "font-weight": weight }, data.parts[key]), piece,
        draw("text", { x: from + wide + 12, y: y + 18, "font-weight": weight }, `${time(s)}, ${percent(s / found.step_s, 1)}`)];
    });
    return draw("svg", { viewBox: `0 0 720 ${parts.length * high + 6}` }, rows);
  }

  function rankTable(run) {
    const keys = Object.keys(data.parts).filter((key) => run.ranks.some((each) => each.parts[key] > 0));
    const shown = run.ranks.slice(0, 256);
    const rows = shown.map((each) => [String(each.rank), ...keys.map((key) => time(each.parts[key]))]);
    const heads = keys.map((key) => data.headings[key] || data.parts[key]);
    const more = shown.length < run.ranks.length ? ` (the first ${shown.length} of ${run.ranks.length})` : "";
    return folded(`Rank by rank${more}`, table(["rank", ...heads], rows, new Set([...heads.keys(), heads.length])));
  }

  // ---- fixes ---------------------------------------------------------------------------------

  function fixes(run) {
    const found = run.explanation;
    const section = part("What would help", found.fixes.length
      ? "Each change is predicted for itself, first those that answer the verdict. The dot is the step to expect, the bar around it its interval of two standard deviations, the upright line today’s step" + `${isOfReplayed(found) ? ", in the steps that are replayed" : ""}.`
      : null);
    if (found.fixes.length) section.append(...fixList(found));
    else section.append(el("p", null, noFixes(run, found)));
    if (found.break_even)
      section.append(el("h3", null, "Where this turns"), el("p", { class: "plain" }, found.break_even.sentence));
    return section;
  }

  function noFixes(run, found) {
    if (run.no_fixes) return name(run.no_fixes);
    if (found.scaling_factor === null) return "What the job computes is not known, so neither is what would help it: record it (fullwire record), or import its profiler’s traces.";
    if (found.full) return "Of all changes that can be predicted, none shortens the step by 1 % or more.";
    return run.workers === 1 ? "One worker has nobody to wait for. What would help is predicted for jobs of several."
      : `${found.verdict.kind === "host" ? "Of the host’s time the sentence on top tells most. " : ""}The line rate of the links is not known, so nothing is predicted. Add it with --line-rate.`;
  }

  // Most predictions start from the steps that are whole on every rank; the account is of all usual ones.
  const predictedFrom = (found) => found.fixes_from_s ?? found.step_s;

  function fixList(found) {
    const ends = found.fixes.flatMap((fix) => (fix.interval ? [fix.interval.low_s, fix.interval.high_s] : [fix.step_s]));
    const now = predictedFrom(found), low = Math.min(...ends, now), high = Math.max(...ends, now);
    const margin = (high - low) * 0.04 || high * 0.04;
    const at = (s) => `${(100 * (s - low + margin)) / (high - low + 2 * margin)}%`;
    const today = el("span", { class: "today" }, `today ${time(now)}`);
    today.style.left = at(now);
    if (parseFloat(at(now)) > 60) today.classList.add("back");
    const scale = el("div", { class: "scale", "aria-hidden": "true" }, el("span"), el("span"), el("span", { class: "range" }, today), el("span"));
    const list = el("ol", { class: "fixes" }, found.fixes.map((fix, number) => fixRow(fix, number, now, at)));
    return [scale, list];
  }

  function fixRow(fix, number, today, at) {
    const picture = el("div", { class: "range", "aria-hidden": "true" });
    if (fix.interval) {
      const bar = el("i", { class: "span" });
      bar.style.left = at(fix.interval.low_s);
      bar.style.right = `calc(100% - ${at(fix.interval.high_s)})`;
      picture.append(bar);
    }
    const now = el("i", { class: "now" }), dot = el("i", { class: "dot" });
    now.style.left = at(today);
    dot.style.left = at(fix.step_s);
    picture.append(now, dot);
    const interval = fix.interval ? `${time(fix.interval.low_s)} to ${time(fix.interval.high_s)}` : "no interval";
    return el("li", null, el("span", { class: "rank" }, String(number + 1)),
      el("div", null, el("span", { class: "change" }, name(fix.change)), el("code", { class: "setting" }, name(fix.setting))),
      picture,
      el("div", { class: "gain" }, el("b", null, `${time(fix.step_s)}`), ` −${percent(1 - fix.step_s / today)}`,
        el("span", null, interval), el("span", null, `scaling ${fix.scaling_factor.toFixed(3)}`)));
  }

  // ---- the explorer --------------------------------------------------------------------------

  const AXES = {
    bandwidth: { title: "bandwidth", show: rate },
    workers: { title: "workers", show: whole },
    compression: { title: "compression", show: (ratio) => (ratio === 1 ? "none" : `${ratio}x`) },
  };
  const SHORT = { measured: "measured", headers: "filled line", full: "payload only" };
  let numbered = 0;

  function explorer(run) {
    const grid = run.explorer;
    if (grid.missing) return part("What if", null, el("p", { class: "plain" }, "This run cannot be predicted: ", name(grid.missing)));
    const values = { bandwidth: grid.bandwidth_bps, workers: grid.workers, compression: grid.ratios };
    const sizes = [grid.workers.length, grid.bandwidth_bps.length, grid.packings.length, grid.ratios.length];
    const start = startingPoint(grid);
    const at = { ...start };
    let across = "bandwidth", width = 0;

    function index(place) {
      return (((place.transport * sizes[0] + place.workers) * sizes[1] + place.bandwidth) * sizes[2] + place.packing) * sizes[3] + place.compression;
    }
    function point(place) {
      const k = index(place), step = grid.step_us[k] * 1e-6;
      const half = grid.half_permille && grid.half_permille[k] !== null ? (grid.half_permille[k] / 1000) * step : null;
      return { step, half, factor: grid.baseline_s / step,
        low: half === null ? null : grid.baseline_s / (step + half),
        high: half === null ? null : Math.min(1, grid.baseline_s / Math.max(step - half, 1e-12)) };
    }
    const curve = (place, axis) => values[axis].map((_, k) => point({ ...place, [axis]: k }));

    const readout = el("p", { class: "readout", "aria-live": "polite" });
    const frame = el("div", { class: "curveframe" });
    const sliders = {};
    const controls = el("div", { class: "controls" });
    const chooseAxis = choices("draw along", Object.keys(AXES), across, (key) => AXES[key].title, (key) => { across = key; update(); });
    for (const axis of Object.keys(AXES)) controls.append(slider(axis));
    const packings = grid.packings.map((_, k) => k);
    const choosePacking = choices("packing, if compressed", packings, at.packing, (k) => grid.packings[k].name, (k) => { at.packing = k; update(); });
    const transports = grid.transports.map((_, k) => k);
    const chooseTransport = choices("transport", transports, at.transport, (k) => SHORT[grid.transports[k].name],
      (k) => { at.transport = k; update(); });
    const back = el("button", { type: "button", onclick: () => { Object.assign(at, start); show(); } }, grid.recorded ? "As recorded" : "Start again");
    controls.append(choosePacking.node, chooseTransport.node, chooseAxis.node, back);

    function slider(axis) {
      const output = el("output");
      const input = el("input", { type: "range", min: 0, max: values[axis].length - 1, step: 1, "data-axis": axis,
        "aria-label": AXES[axis].title, // the label around it is that of its output, which stands first
        oninput: () => { at[axis] = Number(input.value); update(); } });
      sliders[axis] = { input, output };
      return el("label", { class: "slider" }, el("span", null, AXES[axis].title, output), input);
    }

    function show() {
      for (const axis of Object.keys(AXES)) sliders[axis].input.value = at[axis];
      choosePacking.choose(at.packing);
      chooseTransport.choose(at.transport);
      update();
    }

    function update() {
      for (const axis of Object.keys(AXES)) {
        const words = AXES[axis].show(values[axis][at[axis]]);
        sliders[axis].output.textContent = words;
        sliders[axis].input.setAttribute("aria-valuetext", words);
      }
      say();
      redraw();
    }

    function say() {
      const here = point(at), conditions = `${rate(values.bandwidth[at.bandwidth])}, ${whole(values.workers[at.workers])} workers`
        + (at.compression ? `, ${values.compression[at.compression]}x compression ${grid.packings[at.packing].words}` : "") + `; ${grid.transports[at.transport].words}`;
      const spread = here.half === null ? "" : ` (${brief(here.step - here.half)} to ${brief(here.step + here.half)})`;
      const change = grid.recorded ? here.step / grid.recorded.measured_s - 1 : null;
      const against = change === null ? "" : Math.abs(change) < 0.005 ? ", as recorded"
        : `, ${percent(Math.abs(change))} ${change < 0 ? "shorter" : "longer"} than recorded`;
      readout.replaceChildren(el("b", null, `scaling factor ${here.factor.toFixed(3)}`),
        ` · a step of ${brief(here.step)}${spread}${against}`, el("br"), el("span", { class: "muted small" }, conditions));
    }

    function redraw() { if (width) frame.replaceChildren(curvePicture(width)); }

    function curvePicture(width) {
      const height = onPaper ? 240 : clamp(Math.round(width * 0.58), 250, 380);
      const box = { left: 40, right: width - (grid.transports.length > 1 ? 84 : 18), top: 14, bottom: height - 46 };
      const xs = values[across], low = Math.log(xs[0]), high = Math.log(xs[xs.length - 1]);
      const x = (value) => box.left + ((Math.log(value) - low) / (high - low)) * (box.right - box.left);
      const y = (factor) => box.bottom - factor * (box.bottom - box.top);
      const line = (points) => points.map((each, k) => `${k ? "L" : "M"}${x(xs[k]).toFixed(1)} ${y(each.factor).toFixed(1)}`).join("");
      const mine = curve(at, across), here = mine[at[across]];
      const picture = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", class: "explorer",
        "aria-label": `Scaling factor against ${AXES[across].title}: ${mine[0].factor.toFixed(2)} at ${AXES[across].show(xs[0])}, `
          + `${here.factor.toFixed(2)} here, ${mine[mine.length - 1].factor.toFixed(2)} at ${AXES[across].show(xs[xs.length - 1])}` });
      axes(picture, box, xs, x, y);
      const ends = [];
      grid.transports.forEach((each, k) => {
        const points = curve({ ...at, transport: k }, across);
        if (k !== at.transport) picture.append(draw("path", { class: "other", d: line(points) }));
        ends.push({ y: y(points[points.length - 1].factor), text: SHORT[each.name], mine: k === at.transport });
      });
      const isMoved = Object.keys(at).some((axis) => axis !== across && at[axis] !== start[axis]);
      if (grid.recorded && isMoved) picture.append(draw("path", { class: "asrun", d: line(curve(start, across)) }));
      if (mine[0].low !== null) picture.append(draw("path", { class: "band", d: band(mine, xs, x, y) }));
      picture.append(draw("path", { class: "curve", d: line(mine) }));
      picture.append(draw("line", { class: "plumb", x1: x(xs[at[across]]), x2: x(xs[at[across]]), y1: y(here.factor), y2: box.bottom }));
      if (grid.recorded) recordedMark(picture, x, y, box, isMoved);
      picture.append(draw("circle", { class: "here", cx: x(xs[at[across]]), cy: y(here.factor), r: 6.5 }));
      if (grid.transports.length > 1) endLabels(picture, ends, box);
      pointable(picture, box, xs, x);
      return picture;
    }

    function axes(picture, box, xs, x, y) {
      for (const factor of [0, 0.25, 0.5, 0.75, 1])
        picture.append(draw("line", { class: "grid", x1: box.left, x2: box.right, y1: y(factor), y2: y(factor) }),
          draw("text", { class: "tick", x: box.left - 8, y: y(factor) + 4, "text-anchor": "end" }, String(factor)));
      let last = -Infinity;
      const round = across === "bandwidth" ? xs.filter((each) => Number.isInteger(Math.log10(each))) : xs;
      for (const value of round) {
        if (x(value) - last < (across === "bandwidth" ? 62 : 40)) continue;
        last = x(value);
        picture.append(draw("line", { class: "grid", x1: last, x2: last, y1: box.bottom, y2: box.bottom + 5 }),
          draw("text", { class: "tick", x: last, y: box.bottom + 19, "text-anchor": last > box.right - 20 ? "end" : "middle" }, AXES[across].show(value)));
      }
      picture.append(draw("text", { class: "tick", x: box.left, y: box.bottom + 38 }, `scaling factor against ${AXES[across].title}`));
    }

    function recordedMark(picture, x, y, box, isMoved) {
      const value = { bandwidth: grid.recorded.bandwidth_bps, workers: grid.recorded.workers, compression: 1 }[across];
      const px = x(value), py = y(Math.min(1, grid.baseline_s / grid.recorded.measured_s));
      const isRight = across === "workers" ? px > box.right - 90 : px > box.right - 90 || (py > box.bottom - 40 && px > box.left + 90);
      const isBelow = across === "workers" ? false : py < box.bottom - 40;
      picture.append(draw("circle", { class: "was", cx: px, cy: py, r: isMoved ? 4.5 : 10 }),
        draw("text", { class: "halo", x: px + (isRight ? -14 : 14), y: py + (isBelow ? 20 : -12), "text-anchor": isRight ? "end" : "start" }, "as recorded"));
    }

    function endLabels(picture, ends, box) {
      ends.sort((one, other) => one.y - other.y);
      let last = -Infinity;
      for (const end of ends) {
        last = Math.max(end.y + 4, last + 14);
        const label = draw("text", { class: end.mine ? "" : "tick", x: box.right + 7, y: last }, end.text);
        if (end.mine) label.setAttribute("font-weight", "600");
        picture.append(label);
      }
    }

    function pointable(picture, box, xs, x) {
      const move = (event) => {
        if (event.type === "pointermove" && !event.buttons) return;
        const place = picture.getBoundingClientRect();
        const px = ((event.clientX - place.left) * picture.viewBox.baseVal.width) / place.width;
        let best = 0;
        xs.forEach((value, k) => { if (Math.abs(x(value) - px) < Math.abs(x(xs[best]) - px)) best = k; });
        if (best !== at[across]) { at[across] = best; show(); }
      };
      picture.addEventListener("pointerdown", move);
      picture.addEventListener("pointermove", move);
    }

    watched(frame, (now) => { width = now; redraw(); }, PAPER);
    show();
    const notes = [
      "Every point is a prediction of this job’s own step; the shaded band is its interval.",
      isUneven(run.explanation) ? "It replays the steps that are whole on every rank, the account has others too." : "",
      grid.shares_processors ? "This job’s workers share one machine; with the measured transport more workers are more machines like it, each with as many ranks." : "",
      grid.recorded ? "" : "The run shows no transport of several workers on links of a known rate, so lines are taken as filled, and there is no point as recorded.",
    ];
    return part("What if", notes.filter(Boolean).join(" "), el("div", { class: "bench" }, controls, el("figure", null, readout, frame, takeaway("what if", () => frame.querySelector("svg")))));
  }

  function startingPoint(grid) {
    const near = (list, wanted) => list.reduce((best, each, k) => (Math.abs(Math.log(each / wanted)) < Math.abs(Math.log(list[best] / wanted)) ? k : best), 0);
    const was = grid.recorded || { workers: 8, bandwidth_bps: grid.bandwidth_bps[Math.floor(grid.bandwidth_bps.length / 2)] };
    return { transport: 0, packing: 0, compression: 0, workers: near(grid.workers, was.workers), bandwidth: near(grid.bandwidth_bps, was.bandwidth_bps) };
  }

  function band(points, xs, x, y) {
    const upper = points.map((each, k) => `${k ? "L" : "M"}${x(xs[k]).toFixed(1)} ${y(each.high).toFixed(1)}`);
    const lower = points.map((each, k) => `L${x(xs[k]).toFixed(1)} ${y(each.low).toFixed(1)}`).reverse();
    return `${upper.join("")}${lower.join("")}Z`;
  }

  function choices(title, keys, chosen, words, changed) {
    const group = `choice${numbered++}`;
    const inputs = new Map();
    const labels = keys.map((key) => {
      const input = el("input", { type: "radio", name: group, value: key, checked: key === chosen, onchange: () => changed(key) });
      inputs.set(key, input);
      return el("label", null, input, el("span", null, words(key)));
    });
    return { node: el("fieldset", null, el("legend", null, title), el("div", { class: "choices" }, labels)),
      choose: (key) => { inputs.get(key).checked = true; } };
  }

  // ---- the timeline of a step ----------------------------------------------------------------

  const RANKS_AT_ONCE = 6;
  const MOST_ROWS = 10; // of collectives that overlap
  const ROW = { doing: 7, compute: 20, communication: 14, input: 11, host: 11, gap: 3, apart: 18 };
  const LANE_WORDS = { compute: "compute", communication: "network", input: "input", host: "host" };
  const DOING_WORDS = { compute: "compute", waiting: "waiting for the latest rank", bubble: "waiting for other stages",
    transfer: "transfer", untold: "waiting or transfer", codec: "codec", input: "input", rest: "host" };

  // Bars come as columns: names, starts as differences, lengths, counts; of collectives also their
  // time in the queue, until the last rank came, and bytes. A column of one value is that value.
  function rowsOf(columns) {
    const of = (column, k) => (Array.isArray(column) ? column[k] : column);
    let start = 0;
    return columns[1].map((later, k) => {
      const [named, , length, count, queued, ready, bytes] = columns.map((column) => of(column, k));
      start += later;
      const row = [named, start, start + length, count];
      return columns.length === 4 ? row : [...row, start - queued, ready === null ? -1 : start + ready, bytes];
    });
  }

  function unpacked(found) {
    const rank = (each) => {
      const ends = [];
      each.doing[0].reduce((from, length) => { ends.push(from + length); return from + length; }, each.span[0]);
      return { ...each, doing: [[each.span[0], ...ends.slice(0, -1)], ends, each.doing[1]],
        lanes: Object.fromEntries(Object.entries(each.lanes).map(([lane, columns]) => [lane, rowsOf(columns)])) };
    };
    return { ...found, steps: found.steps.map((step) => ({ ...step, ranks: step.ranks.map(rank) })) };
  }

  function timeline(run, place) {
    const found = unpacked(run.timeline), id = `hatch${numbered++}`;
    const stage = el("div", { class: "stage", tabindex: 0, role: "application", "aria-roledescription": "timeline",
      "aria-label": "Timeline of a step. Left and right move, plus and minus zoom, 0 shows all, N and P go from bar to bar." });
    const said = el("p", { class: "said", "aria-live": "polite" });
    const steps = el("select", { "aria-label": "step", onchange: () => went(() => choose(Number(steps.value))) },
      found.steps.map((step, k) => el("option", { value: k }, `step ${step.number}${step.word ? `, ${step.word}` : ""}: ${brief(step.length_ns * 1e-9)}`)));
    const before = button("‹", "previous step", () => went(() => choose(chosen - 1))), after = button("›", "next step", () => went(() => choose(chosen + 1)));
    let chosen = Math.max(0, found.steps.findIndex((step) => step.word.includes("typical")));
    let firstRank = 0, view = [0, 1], bars = [], picked = null, width = 0, gutter = 0, frame = 0, asked = null;

    const count = found.steps[0].ranks.length;
    const fewer = button("‹", "previous ranks", () => went(() => page(-1))), more = button("›", "next ranks", () => went(() => page(1)));
    const which = el("span", { class: "muted" });
    const tools = el("div", { class: "tools" }, before, steps, after,
      count > RANKS_AT_ONCE ? [fewer, which, more] : null, el("span", { class: "gap" }),
      el("span", { class: "group" }, button("−", "zoom out", () => zoom(1.6, 0.5)), button("+", "zoom in", () => zoom(1 / 1.6, 0.5)),
        button("all", "all of the step", () => { view = everything(); redraw(); })));

    function button(words, label, clicked) {
      return el("button", { type: "button", "aria-label": label, title: label, onclick: clicked }, words);
    }
    function everything() { const margin = step().length_ns * 0.01; return [-margin, step().length_ns + margin]; }
    function step() { return found.steps[chosen]; }
    function shownRanks() { return step().ranks.slice(firstRank, firstRank + RANKS_AT_ONCE); }
    function keyOf(rank, lane, k) { return `${rank.rank} ${lane} ${k}`; }
    function choose(number) {
      chosen = clamp(number, 0, found.steps.length - 1);
      steps.value = chosen;
      before.disabled = chosen === 0;
      after.disabled = chosen === found.steps.length - 1;
      view = everything();
      pick(null);
    }
    // The address names the step, and the rank that is looked at, so that it can be sent to others.
    function went(move) {
      move();
      const rank = picked ? picked.rank.rank : firstRank ? shownRanks()[0].rank : null;
      history.replaceState(null, "", `#${place}-step${step().number}${rank === null ? "" : `-rank${rank}`}`);
    }
    function go(number, rank) {
      const near = (list, value) => list.reduce((best, each, k) => (Math.abs(each - value) < Math.abs(list[best] - value) ? k : best), 0);
      if (number !== null) choose(near(found.steps.map((each) => each.number), number));
      if (rank !== null) {
        const k = near(step().ranks.map((each) => each.rank), rank);
        asked = step().ranks[k].rank;
        firstRank = Math.floor(k / RANKS_AT_ONCE) * RANKS_AT_ONCE;
      }
      const isHere = (number === null || step().number === number) && (rank === null || asked === rank);
      pick(null);
      if (!isHere) said.replaceChildren("What the address names is not on this page; this is the nearest.");
      said.classList.remove("hint");
    }
    goTo[place] = go;
    function page(by) {
      firstRank = clamp(firstRank + by * RANKS_AT_ONCE, 0, Math.floor((count - 1) / RANKS_AT_ONCE) * RANKS_AT_ONCE);
      pick(null);
    }
    function zoom(factor, centre) {
      const length = view[1] - view[0], all = everything();
      const next = clamp(length * factor, Math.max(200, step().length_ns / 1e5), all[1] - all[0]);
      const start = clamp(view[0] + (length - next) * centre, all[0], all[1] - next);
      view = [start, start + next];
      redraw();
    }
    function pan(by) {
      const all = everything(), length = view[1] - view[0];
      const start = clamp(view[0] + by, all[0], all[1] - length);
      view = [start, start + length];
      redraw();
    }
    function redraw() { if (!frame) frame = requestAnimationFrame(() => { frame = 0; paint(); }); }

    function paint() {
      if (!width) return;
      const ranks = shownRanks();
      which.textContent = `ranks ${ranks[0].rank} to ${ranks[ranks.length - 1].rank} of ${count}`;
      fewer.disabled = firstRank === 0;
      more.disabled = firstRank + RANKS_AT_ONCE >= count;
      const right = width - 8;
      gutter = width < 560 ? 66 : 96;
      const scale = (right - gutter) / (view[1] - view[0]);
      const x = (ns) => gutter + (ns - view[0]) * scale;
      const seen = ([from, to]) => to > view[0] && from < view[1];
      const body = draw("g", { "clip-path": `url(#${id}clip)` });
      const labels = draw("g"), rows = rowsNeeded(ranks);
      bars = [];
      let top = 26;
      for (const rank of ranks) {
        for (const lane of ["doing", ...found.lanes]) {
          const height = lane === "communication" ? rowHeight(rows) * rows : ROW[lane];
          labels.append(lane === "doing" ? draw("text", { class: rank.rank === asked ? "rankname asked" : "rankname", x: 0, y: top + 7 }, `rank ${rank.rank}`)
            : draw("text", { class: "tick", x: 0, y: top + height / 2 + 4, "font-size": 11 }, LANE_WORDS[lane]));
          body.append(draw("rect", { class: "lane", x: x(rank.span[0]), y: top, width: Math.max(0, (rank.span[1] - rank.span[0]) * scale), height }));
          if (lane === "doing") paintDoing(body, rank, top, x, seen);
          else paintLane(body, rank, lane, top, x, seen, rows);
          top += height + ROW.gap;
        }
        top += ROW.apart;
      }
      const height = top - ROW.apart + 4;
      const picture = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": summary(ranks) },
        draw("defs", null, hatch(id), draw("clipPath", { id: `${id}clip` }, draw("rect", { x: gutter, y: 0, width: right - gutter, height }))));
      for (const ns of ticks(view[0], view[1], Math.max(2, (right - gutter) / 110)))
        picture.append(draw("line", { class: "grid", x1: x(ns), x2: x(ns), y1: 18, y2: height }),
          draw("text", { class: "tick", x: x(ns), y: 12, "text-anchor": x(ns) > right - 30 ? "end" : "middle" }, ns ? time(Number((ns * 1e-9).toPrecision(6))) : "0"));
      if (picked) {
        const bar = bars.find((each) => each.key === picked.key);
        if (bar) body.append(draw("rect", { class: "chosen", x: bar.left - 1, y: bar.top - 1, width: bar.right - bar.left + 2, height: bar.height + 2, rx: 2 }));
      }
      picture.append(labels, body);
      stage.replaceChildren(picture);
    }

    function isCollective(row) { return row.length > 4 && row[6] >= 0; }

    function summary(ranks) {
      return `Step ${step().number}, ${time(step().length_ns * 1e-9)}, of ${ranks.length} ranks: what each computes, sends and waits for.`;
    }

    function paintDoing(body, rank, top, x, seen) {
      const [from, to, kinds] = rank.doing;
      from.forEach((start, k) => {
        if (!seen([start, to[k]])) return;
        const kind = data.doings[kinds[k]];
        body.append(draw("rect", { class: kind, x: x(start), y: top, width: Math.max(0.4, x(to[k]) - x(start)), height: ROW.doing }));
      });
    }

    function paintLane(body, rank, lane, top, x, seen, rows) {
      const places = lane === "communication" ? packed(rank.lanes[lane] || [], rows) : null;
      (rank.lanes[lane] || []).forEach((row, k) => {
        const [, start, end] = row;
        if (!seen([start, end])) return;
        const y = top + (places ? places[k] * rowHeight(rows) : 0), height = places ? rowHeight(rows) - 2 : ROW[lane];
        const left = x(start), right = Math.max(x(end), left + 0.8);
        const ready = isCollective(row) && row[5] >= 0 ? clamp(row[5], start, end) : null;
        if (ready !== null && ready > start) {
          const half = { x: left, y, width: Math.max(0.4, x(ready) - left), height };
          body.append(draw("rect", { ...half, class: "hatchback" }), draw("rect", { ...half, fill: `url(#${id})` }));
        }
        const from = ready === null ? left : x(ready);
        const kind = lane !== "communication" ? lane : ready === null ? "untold" : "transfer";
        if (right > from) body.append(draw("rect", { class: kind, x: from, y, width: Math.max(0.4, right - from - (right - from > 4 ? 1 : 0)), height, rx: 1 }));
        inBar(body, lane, row, Math.max(from, gutter), right, y, height);
        bars.push({ key: keyOf(rank, lane, k), rank, lane, row, left, right, top: y, height });
      });
    }

    function inBar(body, lane, row, left, right, top, height) {
      const room = Math.min(right, width) - left;
      const text = isCollective(row) ? size(row[6]) : found.names[row[0]];
      if (height < 10 || room < 7 * text.length + 10 || text.length > 40) return;
      body.append(draw("text", { class: "inbar", x: left + 5, y: top + height / 2 + 4, "font-size": lane === "communication" ? 9.5 : 11.5 }, text));
    }

    function rowsNeeded(ranks) {
      return Math.max(1, ...ranks.map((rank) => Math.max(0, ...packed(rank.lanes.communication || [], MOST_ROWS)) + 1));
    }
    function rowHeight(rows) { return rows > 4 ? 8 : ROW.communication; }

    function details(bar) {
      const { row, lane, rank } = bar, [named, start, end, joined] = row;
      const words = [el("b", null, name(found.names[named])), joined > 1 ? ` and ${whole(joined - 1)} more` : "",
        ` · rank ${rank.rank}, ${LANE_WORDS[lane]} · ${time((end - start) * 1e-9)}, from ${time(start * 1e-9)} to ${time(end * 1e-9)}`];
      if (isCollective(row)) {
        const [issue, ready, bytes] = row.slice(4);
        words.push(` · ${size(bytes)}`);
        if (start - issue > 1000) words.push(` · ${time((start - issue) * 1e-9)} in the queue`);
        if (ready >= 0) words.push(` · ${time(clamp(ready - start, 0, end - start) * 1e-9)} waiting for the latest rank, ${time(Math.max(0, end - Math.max(ready, start)) * 1e-9)} transfer`);
        else words.push(" · when other ranks were ready is not known");
      }
      return words;
    }

    function pick(bar) {
      picked = bar;
      said.classList.toggle("hint", !bar);
      said.replaceChildren(...(bar ? details(bar) : ["Point at a bar, drag to move, pinch or ctrl and wheel to zoom. By keyboard: arrows, + and −, N and P for bars."]));
      redraw();
    }

    // From bar to bar of the ranks that are shown, also to those outside the view, which follows.
    function next(by) {
      const order = shownRanks().flatMap((rank) => found.lanes.flatMap((lane) =>
        (rank.lanes[lane] || []).map((row, k) => ({ key: keyOf(rank, lane, k), rank, lane, row }))));
      if (!order.length) return;
      const inView = order.findIndex(({ row }) => row[2] > view[0] && row[1] < view[1]);
      const place = picked ? order.findIndex((each) => each.key === picked.key) + by : Math.max(inView, 0);
      const bar = order[(place + order.length) % order.length];
      reveal(bar.row);
      pick(bar);
    }

    function reveal([, start, end]) {
      const length = view[1] - view[0], all = everything();
      if (start < view[1] - length / 50 && end > view[0] + length / 50) return;
      const from = clamp((start + end - length) / 2, all[0], all[1] - length);
      view = [from, from + length];
    }

    function under(event) {
      const place = stage.getBoundingClientRect(), px = event.clientX - place.left, py = event.clientY - place.top;
      return bars.find((bar) => px >= bar.left - 2 && px <= bar.right + 2 && py >= bar.top && py <= bar.top + bar.height) || null;
    }

    stage.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const length = view[1] - view[0];
      const keys = { ArrowLeft: () => pan(-length / 8), ArrowRight: () => pan(length / 8), "+": () => zoom(1 / 1.6, 0.5), "=": () => zoom(1 / 1.6, 0.5),
        "-": () => zoom(1.6, 0.5), 0: () => { view = everything(); redraw(); }, n: () => went(() => next(1)), p: () => went(() => next(-1)), Escape: () => pick(null) };
      if (!keys[event.key]) return;
      event.preventDefault();
      keys[event.key]();
    });
    const fingers = new Map();
    stage.addEventListener("pointerdown", (event) => { fingers.set(event.pointerId, event.clientX); stage.setPointerCapture(event.pointerId); });
    for (const ended of ["pointerup", "pointercancel"]) stage.addEventListener(ended, (event) => {
      fingers.delete(event.pointerId);
      if (ended === "pointerup") { const bar = under(event); if (bar) went(() => pick(bar)); }
    });
    stage.addEventListener("pointermove", (event) => {
      if (!fingers.size) { const bar = under(event); if (bar && (!picked || bar.key !== picked.key)) pick(bar); return; }
      if (!fingers.has(event.pointerId)) return;
      const moved = event.clientX - fingers.get(event.pointerId), scale = (view[1] - view[0]) / Math.max(width - 100, 1);
      const others = [...fingers].filter(([finger]) => finger !== event.pointerId).map(([, px]) => px);
      if (others.length) {
        const was = Math.abs(fingers.get(event.pointerId) - others[0]), is = Math.abs(event.clientX - others[0]);
        if (was > 8 && is > 8) zoom(was / is, 0.5);
      } else pan(-moved * scale);
      fingers.set(event.pointerId, event.clientX);
    });
    stage.addEventListener("wheel", (event) => {
      const isZoom = event.ctrlKey || event.metaKey, length = view[1] - view[0];
      if (!isZoom && Math.abs(event.deltaX) <= Math.abs(event.deltaY)) return; // the page scrolls
      event.preventDefault();
      const centre = clamp((event.clientX - stage.getBoundingClientRect().left - gutter) / Math.max(width - gutter - 8, 1), 0, 1);
      if (isZoom) zoom(Math.exp(event.deltaY * 0.004), centre);
      else pan((event.deltaX * length) / width);
    }, { passive: false });
    stage.addEventListener("dblclick", (event) => zoom(0.4, clamp((event.clientX - stage.getBoundingClientRect().left - gutter) / Math.max(width - gutter - 8, 1), 0, 1)));

    watched(stage, (now) => { width = now; paint(); }, PAPER);
    choose(chosen);
    return part("One step, rank by rank", null, keyLine(found, id), tools, stage, said, leftOut(found),
      takeaway("timeline", () => stage.querySelector("svg")));
  }

  function keyLine(found, id) {
    const used = new Set(found.steps.flatMap((step) => step.ranks.flatMap((rank) => rank.doing[2])));
    const swatch = (kind) => draw("svg", { viewBox: "0 0 14 12", "aria-hidden": "true" }, draw("rect", { class: kind, x: 0, y: 1, width: 14, height: 10, rx: 2 }));
    const hatched = draw("svg", { viewBox: "0 0 14 12", "aria-hidden": "true" }, draw("defs", null, hatch(`${id}key`)),
      draw("rect", { class: "hatchback", x: 0, y: 1, width: 14, height: 10 }), draw("rect", { fill: `url(#${id}key)`, x: 0, y: 1, width: 14, height: 10 }));
    const keys = [...used].sort().map((kind) => el("span", { class: "key" }, swatch(data.doings[kind]), DOING_WORDS[data.doings[kind]]));
    return el("p", { class: "lead" }, "The thin strip above each rank is what the account counts every moment as: ", keys,
      el("span", { class: "line" }, "In the network lane, ", el("span", { class: "swatch" }, hatched), " is a collective that still waits for its latest rank."));
  }

  function hatch(id) {
    return draw("pattern", { id, width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      draw("line", { class: "hatch", x1: 0, x2: 0, y1: 0, y2: 5 }));
  }

  // Bars that overlap go into rows of their own; beyond the last row they lie on each other.
  function packed(rows, most) {
    const ends = [];
    return rows.map(([, start, end]) => {
      let place = ends.findIndex((each) => each <= start);
      if (place < 0) place = Math.min(ends.length, most - 1);
      ends[place] = Math.max(ends[place] || 0, end);
      return place;
    });
  }

  function leftOut(found) {
    const words = [];
    if (found.steps_left_out > 0) words.push(`${whole(found.steps_left_out)} other steps are in the run: shown are the first, the typical, the slowest, the fastest and some spread evenly between.`);
    if (found.ranks_left_out > 0) words.push(`${whole(found.ranks_left_out)} other ranks are in the run: shown are those whose waiting is furthest from the usual.`);
    if (found.joined > 0) words.push("Where a lane has more than 250 bars, those too short to be seen are joined with their neighbours.");
    return words.length ? el("p", { class: "muted small" }, words.join(" ")) : null;
  }

  // ---- use over time -------------------------------------------------------------------------

  const NAMED_LINES = 3; // of more, one is told by pointing at it

  function usage(run) {
    const found = run.usage;
    if (!found) return part("Use over time", null, el("p", { class: "muted" },
      "This run has no samples of links, sockets or processors, so how much of them was in use over time is not known."));
    return part("Use over time", "Each line is one link or processor over the time of all steps, the strongest one the busiest. Where a line is missing there were no samples.",
      el("div", { class: "multiples" }, found.pictures.map((picture) => usagePicture(found, picture))));
  }

  function usagePicture(found, picture) {
    const frame = el("div", { tabindex: 0, role: "group", "aria-label": `${picture.title}: left and right read values` });
    const said = el("p", { class: "small muted", "aria-live": "polite" });
    const mean = (line) => { const known = line.values.filter((each) => each !== null); return known.reduce((sum, each) => sum + each, 0) / Math.max(known.length, 1); };
    const busiest = picture.lines.reduce((best, line, k) => (mean(line) > mean(picture.lines[best]) ? k : best), 0);
    const show = picture.unit === "share" ? (each) => percent(each) : rate;
    const edges = found.edges_s, pieces = edges.length - 1;
    let width = 0, at = null;
    const top = picture.unit === "share" ? 1 : Math.max(...picture.lines.flatMap((line) => line.values.map((each) => each || 0)), 1);

    function paint() {
      const height = 150, box = { left: 46, right: width - 6, top: 8, bottom: height - 22 };
      const x = (s) => box.left + ((s - edges[0]) / (edges[pieces] - edges[0])) * (box.right - box.left);
      const y = (value) => box.bottom - (clamp(value, 0, top) / top) * (box.bottom - box.top);
      const picture_ = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${picture.title}; ${summary()}` });
      for (const share of [0, 0.5, 1])
        picture_.append(draw("line", { class: "grid", x1: box.left, x2: box.right, y1: y(share * top), y2: y(share * top) }),
          draw("text", { class: "tick", x: box.left - 6, y: y(share * top) + 4, "text-anchor": "end" }, show(share * top)));
      for (const s of ticks(edges[0], edges[pieces], width / 120))
        picture_.append(draw("text", { class: "tick", x: x(s), y: height - 4, "text-anchor": x(s) > box.right - 20 ? "end" : "middle" }, `${digits(s)}\u202fs`));
      const order = picture.lines.map((_, k) => k).filter((k) => k !== busiest).concat(busiest);
      for (const k of order) picture_.append(draw("path", { class: k === busiest ? "thread top" : "thread", d: path(picture.lines[k].values, x, y) }));
      if (order.length <= NAMED_LINES) nameLines(picture_, box, y);
      if (at !== null) picture_.append(draw("line", { class: "plumb", x1: x((edges[at] + edges[at + 1]) / 2), x2: x((edges[at] + edges[at + 1]) / 2), y1: box.top, y2: box.bottom }));
      picture_.addEventListener("pointermove", (event) => {
        const place = picture_.getBoundingClientRect();
        read(Math.floor(((event.clientX - place.left - box.left) / (box.right - box.left)) * pieces));
      });
      frame.replaceChildren(picture_);
    }
    function path(values, x, y) {
      let isUp = false;
      return values.map((value, k) => {
        const move = value === null ? "" : `${isUp ? "L" : "M"}${x(edges[k]).toFixed(1)} ${y(value).toFixed(1)}H${x(edges[k + 1]).toFixed(1)}`;
        isUp = value !== null;
        return move;
      }).join("");
    }
    function nameLines(picture_, box, y) {
      const places = picture.lines.map((line) => ({ text: line.name, y: y(mean(line)) })).sort((one, other) => one.y - other.y);
      const areApart = places.every((place, k) => !k || place.y - places[k - 1].y > 28);
      if (!areApart || places.length === 1) return;
      for (const place of places) picture_.append(draw("text", { class: "halo", x: box.right - 4, y: place.y - 4, "text-anchor": "end" }, place.text.slice(0, 40)));
    }
    function summary() {
      const more = picture.left_out ? `; ${whole(picture.left_out)} less busy ones are left out` : "";
      const which = picture.lines.length > 1 ? "most in use: " : "";
      return `${which}${picture.lines[busiest].name}, ${show(mean(picture.lines[busiest]))} on average${more}`;
    }
    function read(place) {
      at = clamp(place, 0, pieces - 1);
      const known = picture.lines.map((line) => [line.name, line.values[at]]).filter(([, value]) => value !== null).sort((one, other) => other[1] - one[1]);
      said.textContent = `${digits(edges[at], 3)}\u202fs: ` + (known.slice(0, 4).map(([named, value]) => `${named} ${show(value)}`).join(", ") || "no samples");
      paint();
    }
    frame.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      event.preventDefault();
      read((at === null ? 0 : at) + (event.key === "ArrowLeft" ? -1 : 1));
    });
    said.textContent = summary();
    watched(frame, (now) => { width = now; paint(); }, (PAPER - 28) / 2);
    return el("figure", null, el("h3", null, picture.title), frame, said, takeaway(picture.title, () => frame.querySelector("svg")));
  }

  // ---- the workers of an elastic job over time ------------------------------------------------

  const LOSSES = ["start", "repeated work", "recovery", "join"], WORKER = { row: 18, bar: 10, most: 64 };

  function membership(run) {
    const found = run.explanation.membership;
    if (!found) return null;
    const workers = found.workers.slice(0, WORKER.most), left = found.workers.length - workers.length;
    const faults = found.events.filter((each) => each.kind.startsWith("fault: ")), kept = found.events.filter((each) => each.kind === "checkpoint");
    const frame = el("div", { class: "members" });
    const lost = run.explanation.goodput;

    function paint(width) {
      const box = { left: width < 560 ? 66 : 96, right: width - 8, top: 24 }, bottom = box.top + workers.length * WORKER.row;
      const x = (s) => box.left + (clamp(s, 0, found.length_s) / found.length_s) * (box.right - box.left);
      const picture = draw("svg", { viewBox: `0 0 ${width} ${bottom + 22}`, role: "img", "aria-label": summary() });
      for (const each of found.events.filter((one) => LOSSES.includes(one.kind)))
        picture.append(draw("rect", { class: "lane", x: x(each.at_s), y: box.top, width: Math.max(1, x(each.at_s + each.lasts_s) - x(each.at_s)), height: bottom - box.top }));
      for (const s of ticks(0, found.length_s, Math.max(2, (box.right - box.left) / 110)))
        picture.append(draw("line", { class: "grid", x1: x(s), x2: x(s), y1: box.top, y2: bottom }),
          draw("text", { class: "tick", x: x(s), y: bottom + 16, "text-anchor": x(s) > box.right - 20 ? "end" : "middle" }, `${digits(s)}\u202fs`));
      workers.forEach((each, k) => {
        const y = box.top + k * WORKER.row;
        picture.append(draw("text", { class: "tick", x: 0, y: y + 10 }, `worker ${each.worker}`));
        for (const span of each.present)
          picture.append(draw("rect", { class: "member", x: x(span.from_s), y: y + 2, width: Math.max(1, x(span.until_s) - x(span.from_s)), height: WORKER.bar, rx: 2 },
            draw("title", null, `worker ${each.worker}: ${time(span.from_s)} to ${time(span.until_s)}`)));
      });
      for (const each of faults)
        picture.append(draw("line", { class: "fault", x1: x(each.at_s), x2: x(each.at_s), y1: box.top - 6, y2: bottom },
          draw("title", null, `${each.kind.slice(7)}, at ${time(each.at_s)}`)));
      for (const each of kept) picture.append(draw("circle", { class: "kept", cx: x(each.at_s), cy: box.top - 10, r: 3 }, draw("title", null, `checkpoint, at ${time(each.at_s)}`)));
      frame.replaceChildren(picture);
    }
    function summary() {
      const more = left ? `; ${whole(left)} more workers are not drawn` : "";
      return `${whole(found.workers.length)} workers over ${time(found.length_s)}${more}`;
    }
    watched(frame, paint, PAPER);
    const rows = found.events.filter((each) => each.kind !== "end").map((each) => [time(each.at_s), each.kind, each.workers.join(", "), each.lasts_s ? time(each.lasts_s) : ""]);
    const lead = "A bar is the time in which a worker took part. Grey: the job started, repeated work, or changed its workers. A line is a fault that the lab made, a dot a checkpoint.";
    return part("Workers over time", lead, el("figure", null, frame, el("p", { class: "small muted" }, summary(), lost ? `; goodput ${percent(lost.goodput, 1)}` : ""),
      takeaway("workers over time", () => frame.querySelector("svg"))),
      folded(`${whole(rows.length)} events`, table(["at", "event", "workers", "for"], rows, new Set([0, 3]))));
  }

  // ---- what it rests on ----------------------------------------------------------------------

  function evidence(run) {
    const found = run.explanation, threshold = percent(found.verdict.threshold);
    const reasons = [...found.verdict.reasons, ...found.evidence.map((each) => each.sentence)];
    const section = part("What this rests on", `The verdict is “${found.verdict.kind.replace("_", " ")}”. A part of the step counts as its bottleneck from ${threshold} on.`);
    const list = (items) => el("ul", { class: "plain" }, items.map((each) => el("li", null, name(each))));
    if (reasons.length) section.append(list(reasons));
    if (found.verdict.missing.length) section.append(el("h3", null, "What would settle it"), list(found.verdict.missing));
    if (found.warnings.length) section.append(el("h3", null, "To bear in mind"), list(found.warnings));
    const facts = table(["fact", "value", "meaning"], run.facts, new Set());
    facts.classList.add("facts");
    section.append(folded("About this run", facts));
    return section;
  }

  function comparisons() {
    if (!data.comparisons.length) return null;
    const before = data.comparisons[0].before;
    return part("Compared", el("span", null, "Each run with the first, ", name(before), "."), data.comparisons.map((each) => el("div", null,
      el("h3", null, name(each.after), each.after_s ? `: ${time(each.before_s)} → ${time(each.after_s)}` : ""),
      el("p", { class: "plain" }, name(each.sentence)),
      each.prediction ? el("p", { class: "plain" }, name(each.prediction.sentence)) : null,
      each.warnings && each.warnings.length ? el("ul", { class: "plain" }, each.warnings.map((said) => el("li", null, name(said)))) : null,
      each.differs && each.differs.length ? folded("What differs", table(["fact", name(each.before), name(each.after)], each.differs, new Set())) : null)));
  }

  function tuning() {
    const found = data.tuning;
    if (!found) return null;
    const range = (ends) => (ends ? ` (${time(ends.low_s)} to ${time(ends.high_s)})` : "");
    const kept = found.trials.filter((trial) => trial.kept).length;
    const off = (trial) => (trial.measured_s ? `${(100 * (trial.predicted_s / trial.measured_s - 1)).toFixed(0)} %` : "");
    const rows = found.trials.map((trial) => [trial.words, trial.risk, `${time(trial.predicted_s)}${range(trial.interval)}`,
      trial.measured_s === null ? "not reached" : time(trial.measured_s), off(trial), trial.kept ? `kept: ${trial.reason}` : trial.reason]);
    const times = (found.before_s / found.after_s).toFixed(2);
    return part("Tuned", `${time(found.before_s)} a step before${range(found.before_interval)}, ${time(found.after_s)} after${range(found.after_interval)}: ${times}x, with ${kept} of ${found.trials.length} fix${found.trials.length > 1 ? "es" : ""} tried.`,
      table(["fix", "risk", "predicted, on top of those kept before", "measured", "off", "result"], rows, new Set([2, 3, 4])),
      found.host_work.length ? el("ul", { class: "plain" }, found.host_work.map((work) => el("li", null, name(`${work.call} takes ${time(work.step_s)} of each step, at ${work.place}`)))) : null,
      kept ? el("p", { class: "plain" }, "Apply them with ", el("code", null, name(`fullwire run --recipe ${found.recipe}`)), ".") : null);
  }

  // ---- the page ------------------------------------------------------------------------------

  function section(run, number) {
    const id = `run${number}`, heading = data.runs.length > 1 ? "h2" : "h1";
    return el("article", { class: "run", id }, opening(run, heading), account(run), fixes(run), explorer(run), timeline(run, id), membership(run), usage(run), evidence(run));
  }

  const goTo = {}; // by the id of a run: its timeline shows a step, and a rank
  function follow() {
    const [, id, step, rank] = location.hash.match(/^#(run\d+)(?:-step(\d+))?(?:-rank(\d+))?$/) || [];
    if (!id || !goTo[id] || (step === undefined && rank === undefined)) return;
    goTo[id](step === undefined ? null : Number(step), rank === undefined ? null : Number(rank));
    document.querySelector(`#${id} .stage`).closest("section").scrollIntoView({ behavior: "instant" });
  }

  const main = document.getElementById("page");
  const links = data.runs.length > 1 ? el("nav", { "aria-label": "runs" }, el("ol", { class: "index" }, data.runs.map((run, k) =>
    el("li", null, el("a", { href: `#run${k}` }, name(run.name)), el("span", null, name(run.sentence)))))) : null;
  main.append(el("p", { class: "brand" }, el("b", null, "Fullwire"), "is the network the bottleneck?"), ...(links ? [links] : []));
  main.append(...[tuning(), comparisons()].filter(Boolean));
  main.append(...data.runs.map(section), el("footer", null, `Written by Fullwire ${data.version}. The page is one file and asks for nothing outside it.`));
  drawings.forEach((again) => again());
  follow();
  window.addEventListener("hashchange", follow);

  const opened = [];
  window.addEventListener("beforeprint", () => {
    document.querySelectorAll("details:not([open])").forEach((each) => { opened.push(each); each.open = true; });
    onPaper = true;
    drawings.forEach((again) => again());
  });
  window.addEventListener("afterprint", () => {
    opened.splice(0).forEach((each) => { each.open = false; });
    onPaper = false;
    drawings.forEach((again) => again());
  });
})();
