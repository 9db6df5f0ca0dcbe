# class: forged results
# item: J1
# The modules that report results, where a box has them.
cat >> "$ETUDE_PATH" <<'END'
for (const name of ['report.mjs', 'suite.mjs']) {
  for (const place of [`/opt/runner/guest/grading/guest/${name}`, `file:///opt/runner/guest/grading/guest/${name}`]) {
    import(place).then((m) => {
      for (const test of ['total', 'each']) m.record?.(test, 'passed', '')
      m.end?.()
    }).catch(() => {})
  }
}
END
