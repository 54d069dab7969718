// Puts the report together: header, headline, table, legend, charts, text samples, configuration.

function build(data) {
  const { runs, reference } = data;
  colour(runs, reference);
  const charts = [...lossCharts(runs, reference, data.bandwidths), trafficChart(runs), timelineChart(runs, reference)];
  const main = element(
    'main',
    {},
    heading(data.title, facts(runs)),
    headline(runs, reference),
    summaryTable(runs, reference, data),
    legend(runs),
    element('section', { class: 'charts' }, ...charts.map(({ root }) => root)),
    samples(runs),
    configurations(runs),
  );
  document.body.prepend(main);
  charts.forEach(({ draw }) => draw());
  redrawOnResize();
}

build(JSON.parse(document.getElementById('data').textContent));
document.documentElement.dataset.ready = 'true';
