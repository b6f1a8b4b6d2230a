"use strict";

// Draws lag, rate and retained WAL of a source over the last day with uPlot. Without this script the
// page shows the same as small pictures.

{
  const AGAIN_MS = 10000; // the interval of the samples
  const LATE_SECONDS = 300; // minutes of another process come late, so the newest values are read again
  const KEPT_SECONDS = 86400;
  const HEIGHT = 170;
  const RANGES = [[3600, "1 h"], [6 * 3600, "6 h"], [KEPT_SECONDS, "24 h"]];
  const FIELDS = [
    ["lag_seconds", "Lag", latency],
    ["changes_per_second", "Changes", rate],
    ["retained_wal_bytes", "WAL retained", size],
  ];

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const clock = (at) => new Date(at * 1000).toISOString().slice(11, 16);

  class History {
    constructor(place) {
      this.place = place;
      this.columns = { times: [] };
      for (const [field] of FIELDS) this.columns[field] = [];
      this.seconds = RANGES[0][0];
      this.charts = [];
      this.load();
      setInterval(() => document.visibilityState === "visible" && this.load(), AGAIN_MS);
      document.addEventListener("visibilitychange", () => document.visibilityState === "visible" && this.load());
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.build());
      new ResizeObserver(() => this.resize()).observe(place);
    }

    async load() {
      const newest = this.columns.times.at(-1) || 0;
      const since = Math.max(0, newest - LATE_SECONDS);
      let fresh;
      try {
        const response = await fetch(`${this.place.dataset.history}&since=${since}`, { cache: "no-store" });
        if (!response.ok) return;
        fresh = await response.json();
      } catch {
        return; // the connection says that the server is away
      }
      const { times } = this.columns;
      if ((times.at(-1) || 0) !== newest) return; // another answer was faster
      const again = times.findIndex((at) => at > since);
      if (again >= 0) for (const values of Object.values(this.columns)) values.length = again;
      const oldest = Date.now() / 1000 - KEPT_SECONDS;
      const gone = times.findIndex((at) => at >= oldest);
      for (const [name, values] of Object.entries(this.columns)) {
        if (gone > 0) values.splice(0, gone);
        for (const value of fresh[name]) values.push(value);
      }
      if (times.length < 2) return;
      if (this.charts.length) this.show();
      else this.build();
    }

    build() {
      if (this.columns.times.length < 2) return;
      this.place.dataset.own = ""; // a refresh of the page leaves it alone from now on
      const title = document.createElement("h2");
      title.textContent = "The last hours";
      this.buttons = document.createElement("div");
      this.buttons.className = "ranges";
      this.buttons.setAttribute("role", "group");
      this.buttons.setAttribute("aria-label", "Time span");
      for (const [seconds, text] of RANGES) {
        const button = document.createElement("button");
        button.type = "button";
        button.className = "second";
        button.textContent = text;
        button.addEventListener("click", () => {
          this.seconds = seconds;
          this.show();
        });
        this.buttons.append(button);
      }
      for (const { chart } of this.charts) chart.destroy();
      this.place.replaceChildren(title, this.buttons);
      this.charts = FIELDS.map(([field, label, format]) => this.draw(field, label, format));
      this.show();
    }

    draw(field, label, format) {
      const figure = document.createElement("figure");
      figure.className = "chart";
      figure.setAttribute("role", "img");
      this.place.append(figure);
      const axis = { stroke: color("--quiet"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line"), width: 1 } };
      const options = {
        width: this.place.clientWidth,
        height: HEIGHT,
        cursor: { sync: { key: "history" }, drag: { x: false, y: false } },
        scales: {
          x: { time: true, range: () => [Date.now() / 1000 - this.seconds, Date.now() / 1000] },
          y: { range: (chart, lowest, highest) => [0, highest > 0 ? highest * 1.05 : 1] },
        },
        axes: [
          { ...axis, values: (chart, moments) => moments.map(clock) },
          { ...axis, size: 70, values: (chart, values) => values.map(format) },
        ],
        series: [
          { label: "UTC", value: (chart, at) => (at == null ? "–" : clock(at)) },
          { label, stroke: color("--accent"), width: 1.5, points: { show: false }, value: (chart, value) => (value == null ? "–" : format(value)) },
        ],
      };
      return { figure, field, label, format, chart: new uPlot(options, this.data(field), figure) };
    }

    data(field) {
      return [this.columns.times, this.columns[field]];
    }

    show() {
      const [, words] = RANGES.find(([seconds]) => seconds === this.seconds);
      for (const button of this.buttons.children) button.setAttribute("aria-pressed", String(button.textContent === words));
      const oldest = Date.now() / 1000 - this.seconds;
      for (const { figure, field, label, format, chart } of this.charts) {
        chart.setData(this.data(field));
        const known = this.columns[field].filter((value, i) => value != null && this.columns.times[i] >= oldest);
        const most = known.length ? `now ${format(known.at(-1))}, at most ${format(Math.max(...known))}` : "not known";
        figure.setAttribute("aria-label", `${label}, the last ${words}: ${most}`);
      }
    }

    resize() {
      const width = this.place.clientWidth;
      for (const { chart } of this.charts) if (chart.width !== width) chart.setSize({ width, height: HEIGHT });
    }
  }

  for (const place of document.querySelectorAll("[data-history]")) new History(place);
}
