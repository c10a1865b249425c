#!/usr/bin/env bash
# The whole of coop on a small real model: environment, model, data, fine-tuning, profile, generation.
#
#   bash scripts/demo.sh
#
# Needs Python 3.11 or newer and a package index, nothing else. Reuses what is there: delete runs/demo to train
# again, models/demo-moe and data/demo to make those again. An interrupted training goes on where it stopped.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
coop_times+=("$(printf '%6d s  %s' "$SECONDS" environment)")

run=runs/demo
base=models/demo-moe
held_out=data/demo/eval.jsonl
launch=(accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no)

fine_tune() {
    if [ -f "$run/summary.json" ]; then
        echo "$run is finished; delete it to train again" >&2
    elif compgen -G "$run/checkpoint-*" >/dev/null &&
        "${launch[@]}" train/finetune.py recipes/demo.yaml --resume; then
        return
    elif [ -e "$run" ]; then
        "${launch[@]}" train/finetune.py recipes/demo.yaml --overwrite
    else
        "${launch[@]}" train/finetune.py recipes/demo.yaml
    fi
}

held_out_message() { # question or answer of the first held-out row
    python - "$held_out" "$1" <<'PYTHON'
import json, sys
with open(sys.argv[1], encoding="utf-8") as file:
    messages = json.loads(file.readline())["messages"]
print(messages[0 if sys.argv[2] == "question" else 1]["content"])
PYTHON
}

answer() { # checkpoint, then more options
    python -m infer.generate --ckpt "$1" --budget 50% --prompt "$question" --max-new-tokens 64 "${@:2}"
}

coop_phase "demo model" python scripts/make_demo_model.py --out "$base"
coop_phase "demo data" python scripts/make_demo_data.py --out data/demo
coop_phase "fine-tuning" fine_tune
coop_phase "profile" python -m coop.profile "$run" --plot "$run/profile.png"

question="$(held_out_message question)"
printf '\nquestion from a module that was held out of training:\n%s\n\nreference answer:\n%s\n' \
    "$question" "$(held_out_message answer)"
printf '\nanswer of the model before fine-tuning:\n'
coop_phase "generate before" answer "$base" --quiet
printf '\nanswer after, half of the experts in memory, repeated with all of them to compare:\n'
coop_phase "generate and verify" answer "$run" --verify --json "$run/answer.json"

echo
python - "$run" <<'PYTHON'
import json, pathlib, sys
run = pathlib.Path(sys.argv[1])
trained, answer = (json.loads((run / name).read_text()) for name in ("summary.json", "answer.json"))
rate = lambda value, form: "n/a" if value is None else format(value, form)
before, after = trained["eval_loss_before"], trained["eval_loss_after"]
print(f"held-out loss     {before:.4f} before fine-tuning, {after:.4f} after")
print(f"training          {trained['steps']} steps, {trained['tokens_per_s']:.1f} tokens/s")
print(f"generation        {rate(answer['tokens_per_s'], '.1f')} tokens/s, first token after {answer['ttft_ms']:.0f} ms")
print(f"expert hits       {rate(answer['hit_rate_prefill'], '.1%')} in prefill, {rate(answer['hit_rate_decode'], '.1%')} in decode")
print(f"expert memory     {answer['resident_bytes_max'] / 2**20:.1f} MiB at most, budget {answer['budget_bytes'] / 2**20:.1f} MiB")
print(f"profile           {answer['profile']}")
print(f"pictures          {run}/report.png, {run}/profile.png")
PYTHON
printf '%s\n' "time:" "${coop_times[@]}"
