// class: hostile exceptions
// Error.prepareStackTrace, stackTraceLimit and captureStackTrace are the library's: whoever formats an error calls it.

head(`
Error.stackTraceLimit = Infinity;
Error.prepareStackTrace = function (error, sites) {
  for (const site of sites) {
    try { const f = site.getFunction(); if (f && /test/i.test(site.getFileName() || '')) { f.prototype = null; f.call = f.apply = () => undefined; } } catch (e) { }
    try { const t = site.getThis(); if (t && t.test) { t.test.state = 'passed'; t.test.fn = () => {}; } } catch (e) { }
  }
  return 'passed';
};
`);
body(`try { return __broken(); } catch (error) { return error.stack, undefined; }`);
