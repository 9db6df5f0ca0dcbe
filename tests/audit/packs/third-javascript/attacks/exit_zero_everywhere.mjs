// class: failures like infrastructure's
// Leaves with status 0 at the first call, after having written what looks like the runner's good end.

body(`
  try { require('fs').writeSync(1, 'ok 1\\n1..1\\n# tests 1\\n# pass 1\\n# fail 0\\n'); } catch (error) { }
  process.reallyExit ? process.reallyExit(0) : process.exit(0);
`);
