r"""Pairs as in answers.py: relations, sentences, rounded tails, labelled ratios, factorials, debris of TeX."""

from __future__ import annotations

SAME = r"""
x\ge 3 | x>=3
x\ge 3 | x >= 3
x\le 3 | x<=3
[3,\infty) | x>=3
x\ge 3 | 3<=x
1\le x\le 2 | 1<=x<=2
x\ne 3 | x != 3
x \ne 3 | x \neq 3
x<3 | -x>-3
x\le 3 | -x \ge -3
x-y<2 | y-x>-2
2x+3y\le 6 | -2x-3y\ge -6
a>b | b<a
x+y<1 | 1>x+y
x<3 | x-3<0
2x<6 | x<3
-1<x<5 | x\in(-1,5)
x\in(-1,5) | -1<x<5
(-1,5) | 5>x>-1
x\in[-1,5) | 5>x\ge -1
0\le x\le 1 | x \in [0,1]
-1<x<5 | x>-1 \text{ and } x<5
-1<x<5 | x > -1, x < 5
(-1,5) | \{x : -1<x<5\}
(-1,5) | \{x \mid -1<x<5\}
(-1,5) | \{x\in\mathbb{R} \mid -1<x<5\}
(-1,5) | x \text{ is in } (-1,5)
-1 \le k \le 3 | k \in [-1,3]
k \in [-1,3] | -1\le k\le 3
(-\infty,1)\cup(3,\infty) | x<1 \text{ or } x>3
x \in (-\infty,1)\cup(3,\infty) | x<1, x>3
x<1\text{ or }x>3 | x\in(-\infty,1)\cup(3,\infty)
x > 2 | x\in(2,\infty)
x \in (2,\infty) | x>2
|x|<2 | (-2,2)
y=2x+1 | x=\frac{y-1}{2}
y=2x+1 | 2x-y+1=0
x+y=1 | y=1-x
y=1-x | x=1-y
3x+4y=12 | y=-\frac{3}{4}x+3
y=-\frac34x+3 | 3x+4y=12
x^2+y^2=25 | y^2=25-x^2
y = \frac{1}{3}x - 2 | x - 3y = 6
a=2b | b=\frac{a}{2}
(1,2),(3,4) | (3,4),(1,2)
(1,2),(3,4) | (x,y)=(3,4),(1,2)
(1,2),(3,4) | (x,y)=(3,4)\text{ or }(x,y)=(1,2)
(1,2),(3,4) | (x,y) = (1,2) \text{ and } (3,4)
(1,2),(3,4) | \{(3,4),(1,2)\}
(1,2), (3,4), (5,6) | (5,6); (1,2); (3,4)
(0,0,0),(1,2,3) | (1,2,3), (0,0,0)
(1,2),(3,4) | (3,4) and (1,2)
(1,2),(3,4) | (3,4)\text{ and }(1,2)
[0,2.5] | \left[0,\frac52\right]
\left(-\infty,\frac52\right] | (-\infty,2.5]
\left(-\frac12,\frac34\right) | (-0.5,0.75)
\left[-2,\frac{1}{3}\right) | [-2, 0.333333)
x\le\frac52 | x\le 2.5
(2.5, \infty) | x>5/2
-0.5<x<1.25 | \left(-\frac12, \frac54\right)
7:32 | a:b = 7:32
7:32 | a : b = 7 : 32
7:32 | a/b = 7/32
7:32 | \frac{a}{b}=\frac{7}{32}
\frac{7}{32} | a:b=7:32
a:b = 7:32 | 7:32
1:2:3 | a:b:c=1:2:3
1:2:3 | 2:4:6
7:32 | \text{ratio } = 7:32
7:32 | 7 \text{ to } 32
7:32 | 7 to 32
12\pi | 12\pi\approx 37.7
3\sqrt2 | 3\sqrt{2} \approx 4.24
\frac{22}{7} | \frac{22}{7} \approx 3.14
37.7 | 12\pi\approx 37.7
x = \sqrt2 | x=\sqrt{2}\approx 1.414
\sqrt{2} | \sqrt2 \approx 1.414 \text{ cm}
\sqrt{2} | \sqrt2 \ (\approx 1.414)
\frac13 | \frac13 \approx 0.333
e^2 | e^2 \sim 7.39
12\pi | 12\pi = 37.699\ldots
12\pi | 12\pi \text{ (approximately 37.7)}
5 | 5\]
5 | 5 \)
5 | 5$
5 | $5$.
5 | 5 \\
5 | 5\end{align*}
5 | 5 \blacksquare
5 | 5\quad\square
5 | 5 \tag{1}
5 | 5\hfill
5 | 5 \,.
5 | 5 \text{.}
5 | 5~
5 | 5}
5 | \(5\)
5 | \[5\]
5 | 5 \qquad
5 | 5 \ldots
5 | 5\!
5 | & 5
5 | = 5
5 | =5
x=5 | & x = 5
5 | \$5\$
5 | 5\text{ }
5 | 5 {}
\frac{1}{2} | \frac{1}{2}\newline
120 | 5!
5! | 5\cdot 4!
10! | 10\cdot 9!
\frac{8!}{3!5!} | 56
\frac{7!}{2!} | 2520
7!/2! | 2520
5!\cdot 4! | 2880
n! | n(n-1)!
(n+1)! | (n+1)\cdot n!
(n+1)! | (n+1)n!
\frac{n!}{(n-2)!} | n(n-1)
\frac{(2n)!}{n!} | \frac{(2n)!}{n!}
3!^2 | 36
(3!)^2 | 36
2\cdot 7! | 10080
8!-7! | 35280
5 | \text{The answer is }5\text{.}
12 | \text{There are } 12 \text{ ways.}
12 | \text{There are 12 ways}
12 | There are 12 ways
\frac34 | The maximum value is $\frac{3}{4}$.
\frac34 | \text{The maximum value is } \frac{3}{4}
5 | \text{Therefore, } x = 5
5 | \text{the value of } x \text{ is } 5
5 | Thus the answer is 5
5 | \text{So the final answer is: } 5
12 | \text{He needs 12 apples in total.}
\text{Evelyn} | \text{The fastest student is Evelyn}
(1,2) | \text{The point is } (1,2)
x=5 | \text{The solution is } x = 5
5 | \text{Area} = 5
5 | \text{Area } = 5 \text{ square units}
2,3 | \text{The solutions are } 2 \text{ and } 3
[0,1] | \text{The range is } [0,1]
\text{(C)} | \text{The correct answer is (C)}
C | \text{Option C}
C | \text{C: } 12
C | C) 12
"""

OTHER = r"""
x>=3 | x<=3
5!=120 | 5
x\ne 3 | x=3
x<3 | -x<-3
x<3 | -x>3
x\le 3 | -x>-3
x<3 | 2x<3
x<3 | -x > -3, x < 2
-1<x<5 | x<-1 \text{ or } x>5
-1<x<5 | x>-1
-1<x<5 | x\in[-1,5]
(-1,5) | \{x : -1\le x<5\}
(-1,5) | \{x : x<5\}
\{1,2\} | \{x : 1<x<2\}
y=2x+1 | x=\frac{y+1}{2}
y=2x+1 | y=1-2x
x+y=1 | x-y=1
x+y=1 | 0=0
x+y=1 | x=1
x=1 | x+y=1
x^2=4 | x=2
y=2x | y^2=2xy
y=x | z=w
a=2b | b=2a
(1,2),(3,4) | (1,2)
(1,2),(3,4) | (2,1),(4,3)
(1,2),(3,4) | (3,4),(2,1)
[0,2.5] | [0,2.4]
[0,\frac13] | [0,0.3]
7:32 | b:a = 32:7
7:32 | 32 to 7
7:32 | a:b = 7:33
7:32 | 7 to 33
12\pi | 13\pi\approx 37.7
12\pi | 12 \approx 12\pi
6 | 5 \approx 6
5 | 4.9\approx 5
37.7 | 12\approx 37.7
37.7 | 2\pi\approx 37.7
\sqrt2 | 1.414
\sqrt2 | 1.4 \approx \sqrt2
5 | 6\tag{5}
5 | 6\end{align*}
\frac12 | \frac13}
5 | 5, 6 \blacksquare
n! | (n-1)!
n! | n(n-2)!
(n+1)! | n! + 1
(n+1)! | n\cdot n!
120 | 4!
5 | \text{The answer is not } 5
5 | \text{The answer is } 5 \text{ or } 6
5 | \text{at least 5}
5 | \text{There are more than 5 ways}
5 | \text{either 5 or 6}
5 | \text{if x = 3 then it is 5}
5 | \text{The values are 5, 6}
12 | \text{There are 12 or 13 ways}
12 | \text{There are 12 hundred ways}
12 | \text{There are 13 ways}
12 | \text{It is between 12 and 13}
12 | \text{The answer is minus 12}
\text{Evelyn} | \text{The fastest student is not Evelyn}
\text{Evelyn} | \text{The fastest student is Carla}
\text{Evelyn} | \text{Evelyn is slower, so it is Carla}
C | \text{Option D}
C | \text{Options C and D}
C | \text{The answer is (D)}
(1,2) | \text{The point is } (2,1)
5 | \text{The answer is 5} \text{ if } x>0
5 | \text{five is the answer, I guess 6}
3 | \text{The answer is } 3x
2,3 | \text{The solutions are } 2
3 | \text{The solutions are } 2 \text{ and } 3
0.5 | \text{half of 0.5}
x<1 | x>1
x>2 | 2>x
(0,1) | 0\le x\le 1
|x|<2 | (-2,2]
|x|<2 | (-3,3)
x+y<1 | x+y>1
x+y<1 | -x-y<-1
2x+3y\le 6 | 2x+3y<6
(-\infty,1)\cup(3,\infty) | x>1 \text{ and } x<3
(-\infty,1)\cup(3,\infty) | x<1
1 | 1 = 2
5 | 5 = 6
x=5 | 5 = x = 6
"""
