"use strict";

// Draws the charts of a source, a table or the fleet with uPlot. The charts replace the pictures that
// the page shows without this script. All charts share cursor, time span and marks.

{
  const AGAIN_MS = 10000; // the interval of the samples
  const LATE_SECONDS = 300; // minutes of another process come late, so the newest values are read again
  const KEPT_SECONDS = 86400;
  const SPAN_SECONDS_MIN = 60;
  const SECONDS_BELOW = 900; // the span below which times have seconds
  const HEIGHT = 120;
  const NEAR_PIXELS = 6; // the distance at which the cursor shows the text of a mark
  const FORMS = { latency, rate, size };
  const POWERS = Array.from({ length: 50 }, (_, n) => 2 ** n); // the steps of an axis of bytes
  const TENTHS = Array.from({ length: 12 }, (_, n) => [1, 2, 5].map((step) => step * 10 ** (n - 1))).flat(); // the steps of an axis of rates; the texts have a decimal
  const LINES = ["--accent", "--quiet", "--ink"];
  const MARKS = { restart: "--quiet", error: "--bad", copy: "--busy" };

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const clock = (at, span = 0) => new Date(at * 1000).toISOString().slice(11, span < SECONDS_BELOW ? 19 : 16);
  const written = (form, value) => (value == null ? "–" : form(value));

  class Charts {
    constructor(place) {
      this.place = place;
      this.title = place.querySelector("h2");
      this.legend = place.querySelector(".legend");
      this.still = [...this.legend.childNodes];
      this.columns = { times: [] };
      this.marks = [];
      this.seconds = 3600;
      this.span = 3600;
      this.figures = $("figure", place).map((figure) => ({
        title: figure.dataset.title,
        form: FORMS[figure.dataset.form],
        plot: figure.querySelector(".plot"),
        values: $("[data-column]", figure),
      }));
      for (const { values } of this.figures) for (const value of values) this.columns[value.dataset.column] = [];
      for (const button of $("[data-seconds]", place)) {
        button.addEventListener("click", () => {
          this.seconds = Number(button.dataset.seconds);
          this.show();
        });
      }
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
        const address = new URL(this.place.dataset.history, location.href);
        address.searchParams.set("since", since);
        const response = await fetch(address, { cache: "no-store" });
        if (!response.ok) return;
        fresh = await response.json();
      } catch {
        return; // the page already shows that the server does not answer
      }
      const { times } = this.columns;
      if ((times.at(-1) || 0) !== newest) return; // a later request got its answer first
      const again = times.findIndex((at) => at > since);
      if (again >= 0) for (const values of Object.values(this.columns)) values.length = again;
      const oldest = Date.now() / 1000 - KEPT_SECONDS;
      const gone = times.findIndex((at) => at >= oldest);
      for (const [name, values] of Object.entries(this.columns)) {
        if (gone > 0) values.splice(0, gone);
        for (const value of fresh[name]) values.push(value);
      }
      this.marks = fresh.marks;
      if (times.length < 2) return;
      if (this.figures.every((figure) => !figure.chart === !this.hasValues(figure))) this.show();
      else this.build();
    }

    build() {
      if (this.columns.times.length < 2) return;
      for (const figure of this.figures) {
        figure.chart?.destroy();
        figure.chart = null;
        if (!this.hasValues(figure)) {
          const words = Object.assign(document.createElement("p"), { className: "quiet", textContent: "no values yet" });
          figure.plot.replaceChildren(words);
          continue;
        }
        figure.plot.replaceChildren();
        figure.chart = new uPlot(this.options(figure), this.data(figure), figure.plot);
      }
      this.show();
    }

    options({ plot, form, values }) {
      const font = "11px system-ui, sans-serif";
      const line = { stroke: color("--line"), width: 1 };
      const axis = { stroke: color("--quiet"), grid: line, ticks: { ...line, size: 4 }, font, gap: 3 };
      return {
        width: plot.clientWidth,
        height: HEIGHT,
        legend: { show: false },
        cursor: { sync: { key: this.place.dataset.history }, drag: { x: false, y: false }, y: false },
        scales: {
          x: { time: true, range: () => this.range() },
          y: { range: (chart, lowest, highest) => [0, highest > 0 ? highest * 1.08 : 1] },
        },
        axes: [
          { ...axis, size: 22, space: 60, values: (chart, moments) => moments.map((at) => clock(at, this.span)) },
          { ...axis, size: 54, space: 26, values: (chart, numbers) => numbers.map(form), ...(form === size && { incrs: POWERS }), ...(form === rate && { incrs: TENTHS }) },
        ],
        series: [
          {},
          ...values.map((value, n) => ({ stroke: color(LINES[n]), width: 1.5, points: { show: false, filter: alone, size: 4, fill: color(LINES[n]) } })),
        ],
        hooks: { setCursor: [(chart) => this.point(chart)], draw: [(chart) => this.mark(chart)] },
      };
    }

    hasValues({ values }) {
      return values.some((value) => this.columns[value.dataset.column].some((known) => known != null));
    }

    data({ values }) {
      return [this.columns.times, ...values.map((value) => this.columns[value.dataset.column])];
    }

    // The span of a chart fits the data: a young process has no empty hour at the left.
    range() {
      const now = Date.now() / 1000;
      const { times } = this.columns;
      return [Math.min(now - SPAN_SECONDS_MIN, Math.max(now - this.seconds, times[0])), Math.max(now, times.at(-1))];
    }

    show() {
      const [begin, end] = this.range();
      this.span = end - begin;
      const words = duration(this.span);
      put([this.title], `The last ${words}`);
      for (const button of $("[data-seconds]", this.place)) {
        button.setAttribute("aria-pressed", String(Number(button.dataset.seconds) === this.seconds));
      }
      for (const figure of this.figures) {
        figure.chart?.setData(this.data(figure));
        const parts = figure.values.map((value) => {
          const values = this.columns[value.dataset.column];
          const known = values.filter((v, i) => v != null && this.columns.times[i] >= begin);
          const most = known.length ? `at most ${figure.form(Math.max(...known))}` : "not known before";
          return `${value.dataset.name} now ${written(figure.form, values.at(-1))}, ${most}`.trim();
        });
        figure.plot.setAttribute("aria-label", `${figure.title}, the last ${words}: ${parts.join("; ")}`);
      }
      this.say(null);
    }

    // Shows the values under the cursor, or the present values without a cursor.
    say(index) {
      for (const { values, form } of this.figures) {
        for (const value of values) {
          value.classList.toggle("past", index != null);
          const column = this.columns[value.dataset.column];
          put($(".then", value), index == null ? "" : written(form, column[index]));
          if (index == null) put($(".now:not([data-lag-seconds], [data-rate])", value), written(form, column.at(-1)));
        }
      }
    }

    point(chart) {
      const { left, idx } = chart.cursor;
      const isAway = left == null || left < 0 || idx == null;
      this.say(isAway ? null : idx);
      if (isAway) {
        this.legend.replaceChildren(...this.still);
        return;
      }
      const near = this.marks.filter((mark) => Math.abs(chart.valToPos(mark.at, "x") - left) <= NEAR_PIXELS);
      put([this.legend], [`${clock(this.columns.times[idx], this.span)} UTC`, ...near.map((mark) => mark.text)].join(" · "));
    }

    mark(chart) {
      const [begin, end] = this.range();
      const { ctx } = chart;
      const { top, height } = chart.bbox;
      const unit = devicePixelRatio;
      ctx.save();
      for (const { at, kind } of this.marks) {
        if (at < begin || at > end) continue;
        const x = Math.round(chart.valToPos(at, "x", true));
        ctx.strokeStyle = ctx.fillStyle = color(MARKS[kind]);
        ctx.lineWidth = unit;
        ctx.setLineDash([2 * unit, 3 * unit]);
        ctx.beginPath();
        ctx.moveTo(x, top);
        ctx.lineTo(x, top + height);
        ctx.stroke();
        ctx.beginPath();
        ctx.moveTo(x - 4 * unit, top);
        ctx.lineTo(x + 4 * unit, top);
        ctx.lineTo(x, top + 6 * unit);
        ctx.fill();
      }
      ctx.restore();
    }

    resize() {
      for (const { chart, plot } of this.figures) {
        if (chart && chart.width !== plot.clientWidth) chart.setSize({ width: plot.clientWidth, height: HEIGHT });
      }
    }
  }

  // A value between two gaps is a point, because it has no line.
  function alone(chart, series) {
    const values = chart.data[series];
    const [first, last] = chart.series[0].idxs;
    const indexes = [];
    for (let i = first; i <= last; i++) {
      if (values[i] != null && values[i - 1] == null && values[i + 1] == null) indexes.push(i);
    }
    return indexes.length ? indexes : null;
  }

  for (const place of document.querySelectorAll("[data-history]")) new Charts(place);
}
