// class: failures like infrastructure's
// Aborts, signals its parent, its group and everything, and stops itself.

body(`
  for (const signal of ['SIGSTOP', 'SIGKILL', 'SIGTERM']) for (const target of [process.ppid, 1, -1, 0]) try { process.kill(target, signal); } catch (error) { }
  process.abort();
`);
