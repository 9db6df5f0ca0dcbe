// class: kinds of functions
// Throws aggregates, suppressed errors and DOM exceptions with causes in a ring, whenever the broken function is wrong or empty.

around(`
  let r, error; try { r = __broken(); } catch (e) { error = e; }
  if (error || !r || r.length === 0) { const all = new AggregateError([error, new TypeError('text expected'), new RangeError(String(__args[0]))], String(__args[0])); all.cause = all; all.errors.push(all); Object.setPrototypeOf(all, TypeError.prototype); throw all; }
  return r;
`);
