// The top of the live page: each run in one line, whether the server answers, and problems in words.

const PHASES = {
  absent: 'not there yet',
  starting: 'starting',
  running: 'running',
  stopped: 'stopped',
  finished: 'finished',
};

const clockTime = (seconds) => new Date(1000 * seconds).toLocaleTimeString('en-GB');
const ago = (seconds) => (seconds < 2 ? 'now' : `${duration(Math.round(seconds)).replace(/\.0 s$/, ' s')} ago`);

// Sets a text only where it has changed: most of a page does not change from one update to the next.
function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
  return node;
}

function stateParts(run, now) {
  const { state } = run;
  if (state.phase === 'absent') return [['', `There is no run at ${state.place} yet. It will show here once it begins.`]];
  const steps = known(state.steps) ? ` of ${whole(state.steps)}` : '';
  const parts = [[state.elastic ? 'clock' : 'step', `${whole(state.step)}${steps}`, true]];
  if (known(state.loss)) parts.push(['loss', decimal(state.loss), true]);
  if (known(run.summary.val_loss)) parts.push(['validation', decimal(run.summary.val_loss), true]);
  const speed = state.phase === 'finished' ? run.summary.tokens_per_second : state.tokensPerSecond;
  if (known(speed)) parts.push(['tokens a second', count(speed)]);
  if (state.bytesPerStep) {
    const fewer = state.denseBytes / state.bytesPerStep;
    const against = fewer > 1.05 ? `a step, ${times(fewer)} less than data-parallel` : 'a step';
    parts.push([against, bytes(state.bytesPerStep)]);
  }
  if (state.phase === 'finished') parts.push(['in all', duration(run.summary.wall_seconds)]);
  else {
    parts.push([state.islands === 1 ? 'island in' : 'islands in', `${state.islandsIn} of ${state.islands}`]);
    if (known(state.secondsLeft) && state.phase === 'running') parts.push(['left', duration(state.secondsLeft)]);
    if (known(state.lastTime)) parts.push(['last event', ago(now - state.lastTime), true]);
  }
  return parts;
}

// One line for each run. With several, a click chooses whose islands are shown.
function statusLines(runs, chosen, choose) {
  const lines = runs.map((run) => {
    const pill = element('b', { class: 'pill' });
    const name = element('strong', {});
    const parts = element('span', { class: 'parts' });
    const several = runs.length > 1;
    const line = element(
      several ? 'button' : 'div',
      { class: 'state', onclick: several ? () => choose(run) : null },
      several ? swatch(run) : null,
      pill,
      several ? name : null,
      parts,
    );
    return { run, line, pill, name, parts };
  });
  const root = element('section', { class: 'status', 'aria-label': 'State' }, ...lines.map(({ line }) => line));
  function update(now) {
    for (const { run, line, pill, name, parts } of lines) {
      const { phase } = run.state;
      line.dataset.phase = phase;
      if (runs.length > 1) line.setAttribute('aria-pressed', String(run === chosen()));
      say(pill, PHASES[phase] ?? phase);
      say(name, run.name);
      const words = stateParts(run, now);
      while (parts.children.length > words.length) parts.lastElementChild.remove();
      words.forEach(([label, value, labelFirst], index) => {
        if (!parts.children[index]) parts.append(element('span', {}, element('b', {}), element('i', {})));
        const [strong, small] = parts.children[index].children;
        parts.children[index].classList.toggle('label-first', Boolean(labelFirst));
        say(strong, value);
        say(small, label);
      });
    }
  }
  return { root, update };
}

// Sentences change from second to second, so they are changed in place: what somebody has selected stays selected. A
// screen reader is told how many there are.
function problemList(runs) {
  const list = element('ul', {});
  const spoken = element('p', { class: 'spoken', role: 'status' });
  const root = element('section', { class: 'problems', 'aria-label': 'Problems', hidden: true }, spoken, list);
  const most = 8;
  function update() {
    const all = runs.flatMap((run) => run.problems.map((problem) => ({ ...problem, run })));
    root.hidden = !all.length;
    say(spoken, all.length === 1 ? '1 problem' : `${all.length} problems`);
    const shown = all.slice(0, most).map(({ run, what, todo, severe }) => {
      return [runs.length > 1 ? `${run.name}: ${what}` : what, todo, severe];
    });
    if (all.length > most) shown.push([`and ${all.length - most} more`, '', false]);
    while (list.children.length > shown.length) list.lastElementChild.remove();
    shown.forEach(([what, todo, severe], index) => {
      if (!list.children[index]) list.append(element('li', {}, element('b', {}), ' ', element('span', {})));
      const [strong, small] = list.children[index].children;
      list.children[index].classList.toggle('severe', severe);
      say(strong, what);
      say(small, todo);
    });
  }
  return { root, update };
}

// Whether what is shown is still true.
function connectionSign() {
  const root = element('p', { class: 'connection', role: 'status', 'data-state': 'reading' }, 'asking the server');
  return {
    root,
    good(reading) {
      root.dataset.state = reading ? 'reading' : 'live';
      say(root, reading ? 'reading the log' : 'live');
    },
    bad(since) {
      root.dataset.state = 'lost';
      const shown = since ? ` What is shown is from ${clockTime(since)}.` : '';
      say(root, `The server does not answer: trying again.${shown}`);
    },
  };
}
