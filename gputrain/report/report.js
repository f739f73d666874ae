"use strict";
// The page is complete without this script, which adds values under the pointer or at the arrow keys, and copying.
(() => {
  const shown = (value, unit) => {
    const scaled = unit === "%" ? 100 * value : value;
    const size = Math.abs(scaled);
    const digits = size !== 0 && (size < 1e-3 || size >= 1e7) ? scaled.toExponential(2)
      : size >= 1000 ? Math.round(scaled).toLocaleString("en") : String(Number(scaled.toPrecision(4)));
    return unit ? `${digits} ${unit}` : digits;
  };
  const nearest = (points, step) => {
    let low = 0, high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] <= step) low = middle; else high = middle;
    }
    return Math.abs(points[low][0] - step) <= Math.abs(points[high][0] - step) ? points[low] : points[high];
  };
  const span = (kind, text) => { // Names that are written from right to left stand alone.
    const one = document.createElement("span");
    one.className = kind; one.textContent = text;
    return one;
  };
  const isHidden = (run) => {
    const box = document.getElementById(`run-${run}`);
    return box && !box.checked;
  };
  let figure = null; // The chart that shows values, those at the step of its data-at.
  const hide = () => {
    if (!figure) return;
    const rule = figure.querySelector(".rule");
    figure.querySelector(".tip").hidden = true;
    delete figure.dataset.at;
    rule.setAttribute("x1", -9); rule.setAttribute("x2", -9);
    figure = null;
  };
  const show = (chart, step) => {
    if (chart !== figure) hide();
    const data = JSON.parse(chart.dataset.chart), box = chart.querySelector("svg").getBoundingClientRect();
    const found = data.curves.filter((curve) => !isHidden(curve.run))
      .map((curve) => [curve, nearest(curve.points, step)]);
    if (!found.length) return hide();
    const rule = chart.querySelector(".rule"), tip = chart.querySelector(".tip");
    figure = chart;
    const at = found.map(([, point]) => point[0]).reduce((a, b) => Math.abs(a - step) <= Math.abs(b - step) ? a : b);
    chart.dataset.at = at;
    const place = data.left + (data.right - data.left) * at / Math.max(1, data.reach);
    rule.setAttribute("x1", place); rule.setAttribute("x2", place);
    const lasting = found.filter(([curve]) => at <= curve.points.at(-1)[0] + data.reach / 50); // A mean is further left.
    tip.replaceChildren(...[`step ${at.toLocaleString("en")}`, ...lasting].map((line) => {
      const row = document.createElement("div");
      if (typeof line === "string") { row.textContent = line; return row; }
      const [curve, point] = line, names = curve.letter || data.curves.length > 1 ? [span("", `${curve.label}:`)] : [];
      row.append(span(`dot c${curve.run % 6}`, curve.letter), ...names, shown(point[1], data.unit));
      return row;
    }));
    tip.hidden = false;
    const right = place > (data.left + data.right) / 2;
    tip.style.left = right ? "auto" : `${place / data.width * box.width + 24}px`;
    tip.style.right = right ? `${(1 - place / data.width) * box.width + 24}px` : "auto";
  };
  const point = (event) => {
    const svg = event.target.closest?.("figure.chart svg");
    if (!svg) return hide();
    const chart = svg.parentElement, data = JSON.parse(chart.dataset.chart), box = svg.getBoundingClientRect();
    const x = (event.clientX - box.left) * data.width / box.width;
    show(chart, Math.round((x - data.left) / (data.right - data.left) * Math.max(1, data.reach)));
  };
  document.addEventListener("pointermove", point);
  document.addEventListener("pointerdown", point);
  document.addEventListener("focusin", (event) => {
    const chart = event.target; // It may have got its values before the window has the focus.
    if (chart !== figure && chart.matches?.("figure.chart:focus-visible")) show(chart, Number.MAX_SAFE_INTEGER);
  });
  document.addEventListener("focusout", hide);
  document.addEventListener("values", (event) => show(event.target, event.detail)); // A live page has replaced it.
  document.addEventListener("keydown", (event) => {
    const chart = event.target.closest?.("figure.chart"), left = event.key === "ArrowLeft";
    if (!chart || !(left || event.key === "ArrowRight")) return;
    event.preventDefault();
    const at = Number(chart.dataset.at ?? Infinity);
    const steps = JSON.parse(chart.dataset.chart).curves.flatMap((curve) => curve.points.map(([step]) => step));
    const further = steps.filter((step) => left ? step < at : step > at);
    if (further.length) show(chart, left ? Math.max(...further) : Math.min(...further));
  });
  document.addEventListener("click", async (event) => {
    const button = event.target.closest?.("button.copy");
    if (!button) return;
    await navigator.clipboard.writeText(button.parentElement.querySelector("code").textContent);
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  });
  if (navigator.clipboard) document.documentElement.classList.add("scripted");
})();
