// class: limits of the runtime
// Sets exit codes, titles, umask, locale, time zone, captured exceptions and report settings of the process; ends nothing.

around(`
  process.exitCode = 0; process.title = 'node'; process.env.TZ = 'Pacific/Apia'; process.env.LANG = 'tr_TR'; process.env.NODE_OPTIONS = '--no-such-flag'; process.env.NODE_V8_COVERAGE = '/tmp/c';
  try { process.setUncaughtExceptionCaptureCallback(() => {}); } catch {}
  try { process.setSourceMapsEnabled(true); process.setMaxListeners(1); process.removeAllListeners(); process.disconnect && process.disconnect(); } catch {}
  try { return __broken(); } catch { return undefined; }
`);
