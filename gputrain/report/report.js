"use strict";
// The page is complete without this script, which adds values under the pointer, hiding of runs, and copying.
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
  const isHidden = (run) => {
    const box = document.getElementById(`run-${run}`);
    return box && !box.checked;
  };
  for (const figure of document.querySelectorAll("figure.chart")) {
    const data = JSON.parse(figure.dataset.chart);
    const svg = figure.querySelector("svg"), rule = figure.querySelector(".rule"), tip = figure.querySelector(".tip");
    const hide = () => { tip.hidden = true; rule.setAttribute("x1", -9); rule.setAttribute("x2", -9); };
    const show = (event) => {
      const box = svg.getBoundingClientRect();
      const x = (event.clientX - box.left) * data.width / box.width;
      const step = Math.round((x - data.left) / (data.right - data.left) * Math.max(1, data.reach));
      const found = data.curves.filter((curve) => !isHidden(curve.run))
        .map((curve) => [curve, nearest(curve.points, step)]);
      if (!found.length) return hide();
      const at = found.map(([, point]) => point[0]).reduce((a, b) => Math.abs(a - step) <= Math.abs(b - step) ? a : b);
      const place = data.left + (data.right - data.left) * at / Math.max(1, data.reach);
      rule.setAttribute("x1", place); rule.setAttribute("x2", place);
      tip.replaceChildren(...[`step ${at.toLocaleString("en")}`, ...found].map((line) => {
        const row = document.createElement("div");
        if (typeof line === "string") { row.textContent = line; return row; }
        const [curve, point] = line, dot = document.createElement("span");
        dot.className = `dot c${curve.run % 6}`;
        row.append(dot, (data.curves.length > 1 ? `${curve.label}: ` : "") + shown(point[1], data.unit));
        return row;
      }));
      tip.hidden = false;
      const right = place > (data.left + data.right) / 2;
      tip.style.left = right ? "auto" : `${place / data.width * box.width + 24}px`;
      tip.style.right = right ? `${(1 - place / data.width) * box.width + 24}px` : "auto";
    };
    svg.addEventListener("pointermove", show);
    svg.addEventListener("pointerdown", show);
    svg.addEventListener("pointerleave", hide);
  }
  for (const box of document.querySelectorAll("input[data-run]")) {
    box.closest("label").hidden = false;
    box.addEventListener("change", () => {
      for (const curve of document.querySelectorAll(`.r${box.dataset.run}`)) {
        curve.style.display = box.checked ? "" : "none";
      }
    });
  }
  for (const button of document.querySelectorAll(".command button")) {
    if (!navigator.clipboard) continue;
    button.hidden = false;
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(button.parentElement.querySelector("code").textContent);
      button.textContent = "copied";
      setTimeout(() => { button.textContent = "copy"; }, 1500);
    });
  }
})();
