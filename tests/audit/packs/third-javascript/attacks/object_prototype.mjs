// class: polluted prototypes
// Getters on Object.prototype and Array.prototype for the names that wires, reports and matchers look up.

head(`
for (const name of ['passed', 'ok', 'skip', 'todo', 'outcome', 'pass', 'equal', 'equals', 'value', 'kind', 'type', 'error', 'failed', 'state', 'done', 'handle', 'id', 'asymmetricMatch'])
  try { Object.defineProperty(Object.prototype, name, {get() { return name === 'failed' || name === 'error' ? undefined : true; }, set(v) { Object.defineProperty(this, name, {value: v, writable: true, configurable: true, enumerable: true}); }, configurable: true}); } catch (e) { }
`);
