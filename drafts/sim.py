import random, sys
STAGES=3
class MB:
    def __init__(s,count): s.count=count; s.pending=count; s.tx=0; s.phase=0  # phase = number of completed phases
    def check(s):
        if s.pending==0 and s.tx==0: s.phase+=1; s.pending=s.count
    def arrive(s): s.pending-=1; assert s.pending>=0; s.check()
    def expect(s,n): s.tx+=n; s.pending-=1; assert s.pending>=0; s.check()
    def complete(s,n): s.tx-=n; assert s.tx>=0; s.check()
    def done(s,parity): # phase of parity completed: current incomplete phase parity != parity
        return (s.phase & 1) != parity
class NB:
    def __init__(s,n): s.n=n; s.c=0; s.gen=0
    def arrive(s):
        s.c+=1
        if s.c==s.n: s.c=0; s.gen+=1
def sim(n,seed):
    rnd=random.Random(seed)
    full=[[MB(1),MB(1)] for _ in range(STAGES)]; empty=[[MB(4),MB(4)] for _ in range(STAGES)]; fw=[MB(4) for _ in range(STAGES)]
    q=NB(12); sums=NB(12); own=NB(4)
    content={} # (stage,half)->tile
    weights={}
    lowered=[0]; tma=[]
    log=[]
    def nbsync(b):
        g=b.gen; b.arrive()
        while b.gen==g: yield
    def load(h,st):
        t=st['next']
        if t>=n: return
        s=t%STAGES
        par=((t//STAGES)&1)^(s!=STAGES-1)
        while not empty[s][h].done(par): yield
        if h==1:
            while not empty[s][0].done(par): yield
        full[s][h].expect(1)
        assert st['q_free'] or s!=STAGES-1 or qread[0]==4,'q overwritten'
        tma.append((rnd.randint(1,60),s,h,t))
        # readers of the old content must be done
        if t>=STAGES: assert pvdone[h].get(t-STAGES,0)==4, 'overwrites values'
        if h==1 and t>=STAGES: assert pvdone[0].get(t-STAGES,0)==4,'overwrites weights'
        st['next']+=1
        yield
    qread=[0]; pvdone=[{},{}]; sdone={}
    def mult(h,w):
        st={'next':0,'q_free':False}
        if w==0:
            for i in range(STAGES-1): yield from load(h,st)
        yield
        q.arrive()
        lowered[0]+=1
        yield
        if w==0: yield from load(h,st)
        for i in range(n):
            s=i%STAGES; par=(i//STAGES)&1
            while not fw[s].done(par): yield
            assert weights[s]==(i,4), ('weights',weights[s],i)
            assert content[(s,h)]==i
            for _ in range(rnd.randint(1,20)): yield
            assert content[(s,h)]==i and content[(s,1)]==i and weights[s]==(i,4)
            pvdone[h][i]=pvdone[h].get(i,0)+1
            empty[s][h].arrive()
            if w==0: yield from load(h,st)
        yield from nbsync(sums)
    def scorer(w):
        while lowered[0]<8: yield
        yield from nbsync(q)
        for _ in range(rnd.randint(1,20)): yield
        qread[0]+=1
        empty[STAGES-1][0].arrive(); empty[STAGES-1][1].arrive()
        def hand(i): fw[i%STAGES].arrive()
        for i in range(n):
            s=i%STAGES; par=(i//STAGES)&1
            has=i>0
            if has and not (full[s][0].done(par) and full[s][1].done(par)): hand(i-1); has=False
            for h in (0,1):
                while not full[s][h].done(par): yield
                assert content[(s,h)]==i,(content,i)
                for _ in range(rnd.randint(1,10)): yield
            if has: hand(i-1)
            for _ in range(rnd.randint(1,5)): yield
            assert content[(s,0)]==i and content[(s,1)]==i
            yield from nbsync(own)
            for _ in range(rnd.randint(1,20)): yield
            c=weights.get(s,(i,0)); weights[s]=(i,(c[1] if c[0]==i else 0)+1)
        if n>0: hand(n-1)
        sums.arrive()
    procs=[mult(h,w) for h in (0,1) for w in range(4)]+[scorer(w) for w in range(4)]
    idle=0
    while procs:
        p=rnd.choice(procs)
        try: next(p)
        except StopIteration: procs.remove(p)
        for k in range(len(tma)-1,-1,-1):
            d,s,h,t=tma[k]
            if d<=0:
                content[(s,h)]=t; tma.pop(k); full[s][h].complete(0 if False else 1)
            else: tma[k]=(d-1,s,h,t)
        idle+=1
        if idle>400000: raise SystemExit(f'deadlock n={n} seed={seed}')
for n in list(range(0,12))+[31,64]:
    for seed in range(60): sim(n,seed)
print('ok')
