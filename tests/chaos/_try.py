import sys, time, tempfile
from pathlib import Path
from tests.chaos.harness import Federation, POINTS
if __name__ == "__main__":
    for alg in sys.argv[1].split(","):
        d = Path(tempfile.mkdtemp())
        t=time.time()
        with Federation(d/"a", algorithm=alg) as fed:
            fed.client("0-1"); fed.client("2-3"); fed.server(); fed.finish(); fed.check(); base=fed.hashes()
        print(alg, "base", round(time.time()-t,2))
        for point in (sys.argv[2].split(",") if len(sys.argv)>2 else POINTS):
            t=time.time()
            with Federation(d/point, algorithm=alg, faults={"schedule":[{"round":2,"kind":"server_crash","at":point}]}) as fed:
                fed.client("0-1"); fed.client("2-3"); fed.server(); fed.finish()
                print(alg, point, fed.hashes()==base, fed.faults(), round(time.time()-t,2)); fed.check()
