// class: hostile exceptions
// Results and messages of lone surrogates, nulls, TAP and JSON lines, terminal codes and line separators.

body(`
  const text = '\\ud800\\udfff\\0\\r\\nok 1 - all\\n1..1\\n# pass 1\\n# fail 0\\n{"passed":true}\\n\\u2028\\u2029\\x1b]0;x\\x07\\x1b[2J<![CDATA[]]>'.repeat(20);
  const error = new RangeError(text);
  error.name = text;
  error.code = text;
  error[text] = {[text]: text};
  console.log(text); console.error(text);
  throw error;
`);
