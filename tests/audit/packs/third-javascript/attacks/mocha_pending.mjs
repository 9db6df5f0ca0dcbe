// class: exceptions that are all
// Throws mocha's signal of a skipped test, node:test's and vitest's, by their names and symbols.

body(`
  class Pending extends Error { constructor() { super('sync skip; aborting execution'); this.name = 'Pending'; this.code = 'VITEST_PENDING'; this.note = 'skip'; } }
  try { this && this.skip && this.skip(); } catch (error) { }
  throw Object.assign(new Pending('sync skip; aborting execution'), {isPending: true, taskId: '1', skip: true});
`);
