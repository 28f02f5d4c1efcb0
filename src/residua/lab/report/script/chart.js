// Line charts: drawn as wide as their place, read by mouse, touch or arrow keys.

function ticks(low, high, count, whole) {
  if (!(high > low)) return [low];
  const raw = Math.max((high - low) / count, whole ? 1 : 0);
  const decade = 10 ** Math.floor(Math.log10(raw));
  const step = (whole ? [1, 2, 5, 10] : [1, 2, 2.5, 5, 10]).map((size) => size * decade).find((size) => size >= raw);
  const found = [];
  for (let place = Math.ceil(low / step - 1e-9); place <= high / step + 1e-9; place += 1) found.push(place * step);
  return found;
}
function logTicks(low, high) {
  const found = [];
  for (let decade = Math.floor(Math.log10(low)); decade <= Math.ceil(Math.log10(high)); decade += 1)
    for (const size of high / low < 200 ? [1, 2, 5] : [1]) found.push(size * 10 ** decade);
  const inside = found.filter((value) => value >= low && value <= high);
  return inside.length > 1 ? inside : ticks(low, high, 5);
}
function scale(low, high, start, end, log) {
  const bend = log ? Math.log : Number;
  const span = bend(high) - bend(low) || 1;
  return (value) => start + ((bend(value) - bend(low)) / span) * (end - start);
}

// options() gives {title, xTitle, lines: [{series, xs, ys, low, high}], share, log, shaded, references, dots, whole, xText}.
function lineChart(options) {
  const node = el("figure", {});
  const edge = { left: 54, right: 12, top: 26, bottom: 38 };
  let view = null;
  let at = null;

  function drawChart() {
    const wanted = options();
    const lines = wanted.lines.filter((line) => !isHidden(line.series) && line.xs.length);
    const width = Math.max(240, node.clientWidth);
    const height = wanted.height || 250;
    const svg = draw("svg", { class: "figure", viewBox: `0 0 ${width} ${height}`, width, height, tabindex: 0,
      role: "img", "aria-label": `${wanted.title}. Arrow keys read the values.` });
    const title = svg.appendChild(draw("text", { class: "title", x: edge.left, y: 15 }, wanted.title));
    node.replaceChildren(svg);
    view = null;
    if (!lines.length) {
      svg.append(draw("text", { class: "tick middle", x: width / 2, y: height / 2 }, "every series is hidden"));
      return;
    }
    const xs = [...new Set(lines.flatMap((line) => line.xs))].sort((a, b) => a - b);
    const ys = lines.flatMap((line) => [...line.ys, ...(line.low || []), ...(line.high || [])]).filter(known);
    const references = wanted.references || [];
    let low = Math.min(...ys, ...references.map(([value]) => value));
    let high = Math.max(...ys, ...references.map(([value]) => value));
    const wide = low > 0 && high > 8 * low;
    const log = !wanted.share && low > 0 && (wanted.log === undefined ? wide : wanted.log);
    if (log) title.textContent += " (log scale)";
    if (wanted.share) [low, high] = [0, 1];
    else if (!log && low > 0 && low < 0.5 * high) low = 0;
    else if (!log) [low, high] = [low - 0.06 * (high - low || 1), high + 0.06 * (high - low || 1)];
    const last = xs[xs.length - 1] > xs[0] ? xs[xs.length - 1] : xs[0] + 1;
    const across = scale(xs[0], last, edge.left, width - edge.right);
    const up = scale(low, high, height - edge.bottom, edge.top, log);
    if (wanted.shaded) {
      const [left, right] = wanted.shaded.map((x) => across(Math.min(Math.max(x, xs[0]), last)));
      svg.append(draw("rect", { class: "shaded", x: left, y: edge.top, width: Math.max(0, right - left),
        height: height - edge.top - edge.bottom }));
    }
    for (const tick of log ? logTicks(low, high) : ticks(low, high, 5))
      svg.append(
        draw("path", { class: "grid", d: `M${edge.left} ${up(tick)}H${width - edge.right}` }),
        draw("text", { class: "tick end", x: edge.left - 6, y: up(tick) + 4 }, shortText(tick)));
    for (const tick of ticks(xs[0], last, width > 500 ? 8 : 5, wanted.whole))
      svg.append(draw("text", { class: "tick middle", x: across(tick), y: height - edge.bottom + 16 },
        shortText(tick)));
    svg.append(draw("text", { class: "tick end", x: width - edge.right, y: height - 4 }, wanted.xTitle));
    for (const [value, name] of references)
      svg.append(
        draw("path", { class: "reference", d: `M${edge.left} ${up(value)}H${width - edge.right}` }),
        draw("text", { class: "tick end", x: width - edge.right, y: up(value) - 4 }, name));
    for (const line of lines) svg.append(drawLine(line, across, up, wanted.dots));
    const cross = draw("path", { class: "cross", visibility: "hidden" });
    svg.append(cross);
    view = { wanted, lines, xs, across, cross, svg, height, width };
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * width;
      point(nearest(xs, x, across), event.clientX, event.clientY);
    });
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("blur", leave);
    svg.addEventListener("keydown", move);
  }

  function drawLine(line, across, up, dots) {
    const points = line.xs.map((x, place) => [x, line.ys[place]]).filter(([, y]) => known(y));
    const path = (list) => list.map(([x, y]) => `${across(x).toFixed(1)} ${up(y).toFixed(1)}`).join("L");
    const group = draw("g", { class: styleOf(line.series), "data-series": line.series });
    if (line.low && line.low.some((value, place) => value !== line.high[place])) {
      const there = line.xs.map((x, place) => [x, line.high[place]]);
      const back = line.xs.map((x, place) => [x, line.low[place]]).reverse();
      group.append(draw("path", { class: "band", d: `M${path([...there, ...back])}Z` }));
    }
    group.append(draw("path", { class: "line", d: `M${path(points)}` }));
    if (dots || points.length === 1)
      for (const [x, y] of points) group.append(draw("circle", { class: "dot", cx: across(x), cy: up(y), r: 2.6 }));
    return group;
  }

  function nearest(list, x, place) {
    return list.reduce((best, each, i) => (Math.abs(place(each) - x) < Math.abs(place(list[best]) - x) ? i : best), 0);
  }

  function point(place, clientX, clientY) {
    at = place;
    const { wanted, lines, xs, across, cross, height } = view;
    const x = xs[place];
    cross.setAttribute("d", `M${across(x)} ${edge.top}V${height - edge.bottom}`);
    cross.setAttribute("visibility", "visible");
    const rows = lines.map((line) => {
      const here = line.xs.indexOf(x) >= 0 ? line.xs.indexOf(x) : nearest(line.xs, across(x), across);
      const band = line.low && line.low[here] !== line.high[here]
        ? ` (${numberText(line.low[here])} to ${numberText(line.high[here])})` : "";
      const away = line.xs[here] === x ? "" : ` at ${shortText(line.xs[here])}`;
      return el("div", {}, el("bdi", {}, clipped(data.series[line.series].label, 32)),
        el("span", {}, `${numberText(line.ys[here])}${band}${away}`));
    });
    showTip(clientX, clientY, `${wanted.xTitle}: ${wanted.xText ? wanted.xText(x) : shortText(x)}`, ...rows);
  }

  function leave() {
    if (view) view.cross.setAttribute("visibility", "hidden");
    at = null;
    hideTip();
  }

  function move(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") leave();
    if (!step || !view) return;
    event.preventDefault();
    const next = at === null ? (step > 0 ? 0 : view.xs.length - 1) : at + step;
    const place = Math.min(view.xs.length - 1, Math.max(0, next));
    const box = view.svg.getBoundingClientRect();
    point(place, box.left + (view.across(view.xs[place]) / view.width) * box.width, box.top + box.height / 3);
  }

  register(node, drawChart);
  return { node, draw: () => redraw(node) };
}
