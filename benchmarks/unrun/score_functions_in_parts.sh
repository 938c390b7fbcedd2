t0=$(date +%s); say(){ echo "== $1 at $(( $(date +%s)-t0 )) s"; }
export PYTHONUNBUFFERED=1 PYTHONPATH=src:tests OMP_NUM_THREADS=1
mkdir -p $OUT/c
for i in 0 1 2 3 4 5 6 7 8 9; do timeout 118 python3 benchmarks/unrun/score_gpu.py 98 check $i 10 > $OUT/c/check$i.txt 2>&1 & done
for i in 0 1 2 5 6 7 8; do timeout 100 python3 benchmarks/unrun/score_gpu.py 90 warm $i 18 > $OUT/c/warm$i.txt 2>&1 & done
wait
say checks; cat $OUT/c/warm*.txt | grep -i error | head -3; cat $OUT/c/check*.txt > $OUT/check.txt; rm -r $OUT/c
grep -v "^checked\|^stopped" $OUT/check.txt | cut -c1-200 | head -40; grep "^checked" $OUT/check.txt | cut -c1-140; grep "stopped" $OUT/check.txt | tr '\n' ' '
timeout 45 python3 benchmarks/unrun/score_gpu.py 45 time 0 1 2>&1 | tee $OUT/time.txt
say rates; timeout 25 python3 benchmarks/unrun/rates.py 2>&1 | tee $OUT/rates.txt
say end
