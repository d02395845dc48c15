#include <cstdio>
#include <cstdlib>
#include <queue>
#include <vector>
#include <random>
#include <algorithm>
using namespace std;
// step unit = 1
struct Case { const char* name; int pairs, S, Q, group; bool causal; };
static mt19937 rng(1);
double jit;
double stepTime(){ static normal_distribution<double> d(0,1); return max(0.7,1.0+jit*d(rng)); }
struct TileRef{int pair,n;bool desc;};
int main(int argc,char**argv){
  double hop=atof(argv[1]); jit=atof(argv[2]); double over=1.0; int C=132;
  Case cases[]={
   {"d64 c 512",1024,512,128,1,1},{"d64 c 2048",256,2048,128,1,1},{"d64 c 8192",64,8192,128,1,1},{"d64 c 16384",32,16384,128,1,1},
   {"d64 f 512",1024,512,128,1,0},{"d64 f 2048",256,2048,128,1,0},{"d64 f 8192",64,8192,128,1,0},{"d64 f 16384",32,16384,128,1,0},
   {"d128 c 512",512,512,64,1,1},{"d128 c 2048",128,2048,64,1,1},{"d128 c 8192",32,8192,64,1,1},{"d128 c 16384",16,16384,64,1,1},
   {"d128 f 512",512,512,64,1,0},{"d128 f 2048",128,2048,64,1,0},{"d128 f 8192",32,8192,64,1,0},{"d128 f 16384",16,16384,64,1,0},
   {"d128 c 4096 32/8",32,4096,64,4,1}};
  for(auto&c:cases){
    int N=c.S/128,M=c.S/c.Q,s=128/c.Q;
    auto run=[&](vector<TileRef> order,bool waits,int walk /*0 up from diag,1 down*/,bool headsInner){
      priority_queue<double,vector<double>,greater<double>> free; for(int i=0;i<C;i++)free.push(0);
      vector<double> turn((size_t)c.pairs*c.group*M,-1e9);
      double end=0,busy=0;
      for(auto&t:order){
        double now=free.top();free.pop(); now+=over;
        int first=c.causal?t.n*s:0; int num=M-first;
        bool down=walk==1&&!t.desc;
        for(int k=0;k<num*c.group;k++){
          int h,i; if(headsInner){h=k%c.group;i=k/c.group;}else{h=k/num;i=k%num;}
          int m=down?M-1-i:first+i;
          now+=stepTime();
          if(waits){ double&u=turn[((size_t)t.pair*c.group+h)*M+m]; now=max(now,u+hop); u=now; }
        }
        free.push(now); end=max(end,now);
      }
      return end;
    };
    auto plain=[&]{vector<TileRef>o; int mixed=c.causal?min(c.pairs,(2*132+N-1)/N):0; 
      for(int p=0;p<c.pairs-mixed;p++)for(int n=0;n<N;n++)o.push_back({p,n,false});
      for(int n=0;n<N;n++)for(int p=c.pairs-mixed;p<c.pairs;p++)o.push_back({p,n,false});return o;};
    auto grouped=[&](int G,bool desc){vector<TileRef>o; for(int b=0;b<c.pairs;b+=G)for(int n=0;n<N;n++)for(int p=b;p<min(c.pairs,b+G);p++)o.push_back({p,desc?N-1-n:n,desc});return o;};
    auto combo=[&](int G,int last){vector<TileRef>o; int b0=max(0,c.pairs-last); for(int b=0;b<b0;b+=G)for(int n=0;n<N;n++)for(int p=b;p<min(b0,b+G);p++)o.push_back({p,N-1-n,true});
      for(int n=0;n<N;n++)for(int p=b0;p<c.pairs;p++)o.push_back({p,n,false});return o;};
    double base=run(plain(),false,0,false);
    printf("%-18s base %8.1f |",c.name,base);
    for(int G:{1,2,4,8,16,32,64}) if(G<=c.pairs) printf(" A%d %.3f",G,run(grouped(G,false),true,c.causal,true)/base);
    if(c.causal){ printf("\n      ");
      for(int G:{1,4,16}) if(G<=c.pairs) printf(" B%d %.3f",G,run(grouped(G,true),true,1,true)/base);
      int mixed=min(c.pairs,(2*132+N-1)/N);
      for(int G:{1,4,16}) for(int k:{1,2,4}) if(G<=c.pairs) printf(" C%d,%d %.3f",G,k*mixed,run(combo(G,k*mixed),true,1,true)/base);
    }
    printf("\n");
  }
}
