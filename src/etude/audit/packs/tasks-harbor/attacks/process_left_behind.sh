# class: leftover process
# A process writes the reward after the agent has ended.
setsid sh -c 'while :; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; sleep 0.05; done' > /dev/null 2>&1 < /dev/null &
sleep 0.2
