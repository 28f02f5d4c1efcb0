// The views that take the place of the static pictures, the navigation and the theme.

function curves(mount) {
  const state = { x: "tokens", y: "loss", log: false, from: 10 };
  const titles = { tokens: "training tokens", cpu_seconds: "processor seconds", loss: "validation loss", bits_per_byte: "bits per byte" };
  const options = () => {
    const curves = data.curves.map((curve, series) => ({ curve, series })).filter(({ series }) => ofSize(series));
    const last = Math.max(...curves.map(({ curve }) => curve[state.x][curve[state.x].length - 1]));
    const start = (state.from / 100) * last;
    const lines = curves.map(({ curve, series }) => {
      const first = Math.max(0, Math.min(curve[state.x].findIndex((x) => x >= start), curve[state.x].length - 2));
      const part = (values) => values.slice(first);
      const y = curve[state.y];
      return { series, xs: part(curve[state.x]), ys: part(y.mean), low: part(y.low), high: part(y.high) };
    });
    return { title: titles[state.y], xTitle: titles[state.x], lines, log: state.log, height: 340, dots: lines[0].xs.length <= 12,
      xText: (x) => (state.x === "tokens" ? x.toLocaleString("en-US") : numberText(x)) };
  };
  const chart = lineChart(options);
  const change = (changes) => {
    Object.assign(state, changes);
    text.textContent = `${state.from} %`;
    chart.draw();
  };
  const slider = el("input", { type: "range", min: 0, max: 90, step: 5, value: state.from, id: "curves-from", oninput: () => change({ from: Number(slider.value) }) });
  const text = el("output", { for: "curves-from" }, `${state.from} %`);
  mount.replaceChildren(
    el("div", { class: "bar" },
      select("curves-x", "Against", [["tokens", titles.tokens], ["cpu_seconds", titles.cpu_seconds]], state.x, (x) => change({ x })),
      select("curves-y", "Show", [["loss", "loss"], ["bits_per_byte", "bits per byte"]], state.y, (y) => change({ y })),
      checkbox("log scale", (log) => change({ log })),
      el("label", { for: "curves-from" }, "from"), slider, text),
    legend(), chart.node);
}

function depth(mount) {
  const panels = data.measured.map(([key, title]) => lineChart(() => {
    const lines = data.depth.map((each, series) => {
      const places = each ? each.sites.map((_, place) => place).filter((place) => known(each[key][place])) : [];
      return { series, xs: places.map((place) => each.position[place]), ys: places.map((place) => each[key][place]) };
    }).filter((line) => line.xs.length && ofSize(line.series));
    const drawn = data.depth.filter((each, series) => each && ofSize(series));
    const begins = new Set(drawn.map((each) => each.position[each.deep.indexOf(true)]));
    const ends = Math.max(...drawn.map((each) => each.position[each.position.length - 1]));
    const sites = drawn[0];
    return { title, xTitle: "Transformer block (the head is last)", whole: true, lines, share: data.shares.includes(key), dots: !sites || sites.sites.length <= 40,
      shaded: begins.size === 1 ? [[...begins][0] - 0.25, ends] : null,
      references: key === "max_weight" ? [[data.paper.states, "paper, states"], [data.paper.deltas, "paper, deltas"]] : [],
      xText: (x) => sites.sites[sites.position.indexOf(x)] || shortText(x) };
  }));
  mount.replaceChildren(legend(), el("div", { class: "panels" }, panels.map((panel) => panel.node)));
}

// The static maps stay in their places; each gives way to one that answers to the mouse.
function axes(mount) {
  const drawn = data.axes.map((each, series) => ({ each, series })).filter(({ each }) => each.depth || each.sequence);
  const pairs = mount.querySelectorAll(".pair");
  drawn.forEach(({ each, series }, place) => {
    ["depth", "sequence"].forEach((axis, side) => {
      const part = each[axis];
      if (!part) return;
      const most = Math.min(16, Math.max(...part.weights.map((row) => row.length)));
      const columns = Array.from({ length: most }, (_, back) => String(back));
      const signed = Boolean(part.signed);
      const unit = axis === "depth" ? "source" : "token";
      const map = heatMap(() => ({ title: `Weight by ${unit}s back of ${data.series[series].label}`, rows: part.sites, columns, signed,
        largest: Math.max(...part.weights.flat().filter(known).map(Math.abs)), value: (row, column) => part.weights[row][column],
        text: (row, column, value) => `${part.sites[row]}, ${column} ${unit}${column === 1 ? "" : "s"} back: ${weightText(value)}` }));
      pairs[place].children[side].querySelector(".scroll").replaceWith(map.node);
    });
  });
}

// A static map gives way to one that answers to the mouse and the keys.
function liveMap(node, rows, columns, cells, options) {
  const map = heatMap(() => ({ rows, columns, value: (row, column) => cells[row][column], ...options }));
  node.replaceWith(map.node);
}

function knockouts(mount) {
  data.knockouts.forEach((each, series) => {
    if (!each) return;
    const cells = gridOf(each, each.mean);
    liveMap(mount.querySelector(`[data-series="${series}"] .scroll`), each.sites, each.sources, cells, {
      title: `Change of the loss of ${data.series[series].label} without each source`, signed: true, digits: 3, largest: largestOf(cells),
      text: (row, column, value) => `${each.sites[row]} without ${each.sources[column]}: ${known(value) ? signedText(value) : "cannot be read"}` });
  });
}

function loops(mount) {
  data.loops.forEach((each, series) => {
    if (!each) return;
    const largest = Math.max(...each.weights.map(largestOf));
    mount.querySelectorAll(`[data-series="${series}"] .scroll`).forEach((node, turn) =>
      liveMap(node, each.sites, each.sources, each.weights[turn], { title: `Weights in pass ${turn + 1}`, signed: each.signed, largest,
        text: (row, column, value) => `pass ${turn + 1}: ${each.sites[row]} \u2190 ${each.sources[column]}: ${weightText(value)}` }));
  });
}

function theme(button) {
  const root = document.documentElement;
  const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const show = () => {
    button.textContent = dark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Use the ${dark() ? "light" : "dark"} colours`);
    themed.clear();
    redrawAll();
  };
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    show();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  show();
}

function navigation() {
  const links = [...document.querySelectorAll("nav a")];
  const watch = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries)
      if (isIntersecting) for (const link of links) link.setAttribute("aria-current", String(link.hash === `#${target.id}`));
  }, { rootMargin: "-20% 0px -70% 0px" });
  for (const section of document.querySelectorAll("main section")) watch.observe(section);
}

for (const [id, view] of Object.entries({ curves, routing: explorer, paths, knockouts, loops, depth, axes })) {
  const mount = document.getElementById(`${id}-mount`);
  if (mount) view(mount);
}
showSize();
theme(document.getElementById("theme"));
navigation();
(window.requestIdleCallback || setTimeout)(drawEverything);
document.documentElement.dataset.ready = "true";
